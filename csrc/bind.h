// Checks that the Python faces share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "kernels.h"

namespace sparseloco {

namespace nb = nanobind;
using Array = nb::ndarray<nb::device::cpu>;

inline bool is_bf16(const Array& a) {
    return a.dtype().code == uint8_t(nb::dlpack::dtype_code::Bfloat) && a.dtype().bits == 16;
}

inline bool is_float32(const Array& a) { return a.dtype() == nb::dtype<float>(); }

// Ten numbers in the order of the struct; kernels/geometry.py makes them.
inline Geometry geometry_of(const std::vector<int64_t>& numbers) {
    if (numbers.size() * sizeof(int64_t) != sizeof(Geometry))
        throw nb::value_error("geometry: must be the ten numbers of TileGeometry; see kernels/geometry.py");
    Geometry g;
    std::memcpy(&g, numbers.data(), sizeof g);
    return g;
}

inline void require(bool holds, const std::string& message) {
    if (!holds) throw nb::value_error(message.c_str());
}

inline bool contiguous(const Array& a) {
    int64_t expected = 1;
    for (size_t d = a.ndim(); d-- > 0;) {
        if (a.shape(d) > 1 && a.stride(d) != expected) return false;
        expected *= int64_t(a.shape(d));
    }
    return true;
}

// Items from the first to behind the last one of an array with positive strides.
inline int64_t extent(const Array& a) {
    int64_t last = 0;
    for (size_t d = 0; d < a.ndim(); ++d) {
        if (a.shape(d) == 0) return 0;
        require(a.stride(d) >= 0, "live=negative stride: must have positive strides; make the tensor contiguous");
        last += (int64_t(a.shape(d)) - 1) * a.stride(d);
    }
    return last + 1;
}

// Whether all chunks lie in `extent` items; a chunk has fewer than 2^32 values.
inline bool inside(const Geometry& g, int64_t extent) {
    const int64_t numbers[] = {g.first_row,  g.panels,    g.panel_height, g.row_offset,
                               g.col_offset, g.grid_rows, g.grid_cols,    g.row_stride};
    for (const int64_t number : numbers)
        if (number < 0 || number > extent) return false;
    // An extent is below 2^47 in any memory, so 128 bits hold all products of three.
    if (__int128(g.panels) * g.grid_rows * g.grid_cols > extent) return false;
    if (g.chunks() == 0) return true;
    const __int128 row = __int128(g.first_row) + __int128(g.panels - 1) * g.panel_height + g.row_offset +
                         __int128(g.grid_rows) * g.rows - 1;
    return row * g.row_stride + g.col_offset + __int128(g.grid_cols) * g.cols <= extent;
}

void bind_encode(nb::module_& m);
void bind_settle(nb::module_& m);

}  // namespace sparseloco

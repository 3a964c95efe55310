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

void bind_encode(nb::module_& m);
void bind_settle(nb::module_& m);

}  // namespace sparseloco

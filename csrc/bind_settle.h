// Checks that the faces of gap coding and settling share.
#pragma once

#include "bind.h"
#include "gaps.h"

namespace sparseloco {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;

inline const uint8_t* data_of(const Bytes& bytes) { return static_cast<const uint8_t*>(bytes.data()); }

inline Coding coding_of(int coding) {
    if (coding != 0 && coding != 1) throw nb::value_error("coding: must be 0 (fixed) or 1 (compact)");
    return Coding(coding);
}

// Bounds keep every product of the format far from 2^63.
inline GapShape gap_shape(int64_t chunks, int64_t kept, int64_t chunk) {
    constexpr int64_t kMost = int64_t(1) << 48;
    if (chunk < 1 || chunk > (int64_t(1) << 31) || kept < 1 || kept > chunk || chunks < 0 || chunks > kMost / chunk)
        throw nb::value_error("shape: must have 1 <= K <= C <= 2^31, and N * C at most 2^48");
    return GapShape(chunks, kept, chunk);
}

void bind_gaps(nb::module_& m);

}  // namespace sparseloco

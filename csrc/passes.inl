// Plain passes over memory.
#include <algorithm>

namespace sparseloco::ISA_NAMESPACE {

template <typename T>
inline uint32_t magnitude_bits(T x);
template <>
inline uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }
template <>
inline uint32_t magnitude_bits(uint16_t x) { return uint32_t(x & 0x7fff) << 16; }

template <typename T>
float max_magnitude_of(const T* live, const Geometry& where, int64_t first, int64_t last) {
    uint32_t largest = 0;  // magnitudes order as their bits do, and NaN lies above infinity
    for (int64_t n = first; n < last; ++n) {
        const T* row = live + where.offset(n);
        for (int64_t r = 0; r < where.rows; ++r, row += where.row_stride)
            for (int64_t c = 0; c < where.cols; ++c) largest = std::max(largest, magnitude_bits(row[c]));
    }
    return largest > 0x7f800000u ? float_of(0x7f800000u) : float_of(largest);
}

float max_magnitude(const void* live, bool bf16, const Geometry& where, int64_t first, int64_t last) {
    return bf16 ? max_magnitude_of(static_cast<const uint16_t*>(live), where, first, last)
                : max_magnitude_of(static_cast<const float*>(live), where, first, last);
}

}  // namespace sparseloco::ISA_NAMESPACE

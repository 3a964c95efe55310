// Steps of the selection in plain C++.

namespace sparseloco::ISA_NAMESPACE {

inline int64_t count_keys(const uint16_t* keys, int64_t n, uint16_t border) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 32) {
        uint16_t some = 0;  // as narrow as the keys, so that a compiler can count many at once
        for (int64_t j = 0; j < 32; ++j) some = uint16_t(some + (keys[i + j] >= border));
        count += some;
    }
    return count;
}

// Writes the positions of keys >= border; n is a multiple of 64.
inline int64_t list_keys(const uint16_t* keys, int64_t n, uint16_t border, uint16_t* out) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        out[count] = uint16_t(i);
        count += keys[i] >= border;
    }
    return count;
}

// Values at `n` positions and their magnitudes.
inline void fetch(const float* values, const uint16_t* index, int64_t n, uint32_t* bits, uint32_t* magnitudes) {
    for (int64_t i = 0; i < n; ++i) {
        bits[i] = bits_of(values[index[i]]);
        magnitudes[i] = bits[i] & 0x7fffffffu;
    }
}

inline int64_t count_magnitudes(const uint32_t* magnitudes, int64_t n, uint32_t border) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += magnitudes[i] >= border;
    return count;
}

// Keeps what lies above the border and the first `equals` of what equals it; fills up with zeros to a multiple of 16.
inline void keep(const EncodeScratch& s, int64_t n, uint32_t border, int64_t equals) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        s.index[count] = s.candidates[i];
        s.value[count] = float_of(s.bits[i]);
        const bool same = s.magnitudes[i] == border && equals > 0;
        equals -= same;
        count += same || s.magnitudes[i] > border;
    }
    for (int i = 0; i < 16; ++i) s.value[count + i] = 0;
}

inline uint32_t largest_magnitude(const float* value, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = bits_of(value[i]) & 0x7fffffffu;
        most = most > magnitude ? most : magnitude;
    }
    return most;
}

// Sum of floor(|value| * factor); all partial sums are whole numbers below 2^53, so the order does not matter.
inline double sum_of_floors(const float* value, int64_t n, double factor) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += int64_t(double(float_of(bits_of(value[i]) & 0x7fffffffu)) * factor);
    return double(total);
}

// Codes of 16 values, two bits each; the values become what is left of them.
inline uint32_t code16(float* value, float border, float low, float high) {
    uint32_t codes = 0;
    for (int i = 0; i < 16; ++i) {
        const float v = value[i];
        const bool negative = v < 0, large = (negative ? -v : v) > border;
        const float level = large ? high : low;
        value[i] = v + (negative ? level : -level);
        codes |= uint32_t(negative + 2 * large) << 2 * i;
    }
    return codes;
}

}  // namespace sparseloco::ISA_NAMESPACE

// Steps of the selection, AVX2. Arrays of keys are whole multiples of 32 and aligned; borders are at least 1.
// Keys and magnitudes have no sign bit, so signed comparison serves.

namespace sparseloco::ISA_NAMESPACE {

inline __m256i load8(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }

inline int64_t count_keys(const uint16_t* keys, int64_t n, uint16_t border) {
    const __m256i t = _mm256_set1_epi16(short(border - 1)), one = _mm256_set1_epi16(1);
    __m256i lanes = _mm256_setzero_si256();  // below 2^15: a lane sees at most 32768 / 16 keys
    for (int64_t i = 0; i < n; i += 32) {
        lanes = _mm256_sub_epi16(lanes, _mm256_cmpgt_epi16(load8(keys + i), t));
        lanes = _mm256_sub_epi16(lanes, _mm256_cmpgt_epi16(load8(keys + i + 16), t));
    }
    const __m256i pairs = _mm256_madd_epi16(lanes, one);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
    return _mm_cvtsi128_si32(sum);
}

inline uint64_t at_least32(const uint16_t* keys, __m256i below) {
    const __m256i a = _mm256_cmpgt_epi16(load8(keys), below), b = _mm256_cmpgt_epi16(load8(keys + 16), below);
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8);  // packing works within halves
    return uint32_t(_mm256_movemask_epi8(both));
}

// Writes the positions of keys >= border; n is a multiple of 64.
inline int64_t list_keys(const uint16_t* keys, int64_t n, uint16_t border, uint16_t* out) {
    const __m256i below = _mm256_set1_epi16(short(border - 1));
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t mask = at_least32(keys + i, below) | at_least32(keys + i + 32, below) << 32;
        const int64_t found = _mm_popcnt_u64(mask);
        // Four without a branch on how many there are, which cannot be foreseen; what is too many is overwritten.
        for (int j = 0; j < 4; ++j, mask = _blsr_u64(mask)) out[count + j] = uint16_t(i + int64_t(_tzcnt_u64(mask)));
        for (int j = 4; mask; ++j, mask = _blsr_u64(mask)) out[count + j] = uint16_t(i + int64_t(_tzcnt_u64(mask)));
        count += found;
    }
    return count;
}

// Values at `n` positions and their magnitudes; both are filled up with zeros to a multiple of 16.
inline void fetch(const float* values, const uint16_t* index, int64_t n, uint32_t* bits, uint32_t* magnitudes) {
    for (int64_t i = 0; i < n; ++i) {
        bits[i] = bits_of(values[index[i]]);
        magnitudes[i] = bits[i] & 0x7fffffffu;
    }
    for (int64_t i = n; i % 16; ++i) bits[i] = magnitudes[i] = 0;
}

inline int64_t count_magnitudes(const uint32_t* magnitudes, int64_t n, uint32_t border) {
    const __m256i t = _mm256_set1_epi32(int(border - 1));
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 16) {
        const __m256i a = _mm256_cmpgt_epi32(load8(magnitudes + i), t);
        const __m256i b = _mm256_cmpgt_epi32(load8(magnitudes + i + 8), t);
        count += _mm_popcnt_u32(uint32_t(_mm256_movemask_epi8(_mm256_packs_epi32(a, b)))) / 2;
    }
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
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 8) most = _mm256_max_epi32(most, _mm256_and_si256(load8(value + i), no_sign));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return uint32_t(_mm_cvtsi128_si32(half));
}

// Sum of floor(|value| * factor); all partial sums are whole numbers below 2^53, so the order does not matter.
inline double sum_of_floors(const float* value, int64_t n, double factor) {
    const __m256d scale = _mm256_set1_pd(factor), sign = _mm256_set1_pd(-0.0);
    __m256d total = _mm256_setzero_pd();
    for (int64_t i = 0; i < n; i += 4) {
        const __m256d wide = _mm256_andnot_pd(sign, _mm256_cvtps_pd(_mm_load_ps(value + i)));
        total = _mm256_add_pd(total, _mm256_floor_pd(_mm256_mul_pd(wide, scale)));
    }
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(total), _mm256_extractf128_pd(total, 1));
    return _mm_cvtsd_f64(half) + _mm_cvtsd_f64(_mm_unpackhi_pd(half, half));
}

inline uint32_t code8(float* value, float border, float low, float high) {
    const __m256 v = _mm256_load_ps(value), sign = _mm256_set1_ps(-0.0f);
    const __m256 negative = _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_LT_OQ);
    const __m256 large = _mm256_cmp_ps(_mm256_andnot_ps(sign, v), _mm256_set1_ps(border), _CMP_GT_OQ);
    const __m256 level = _mm256_blendv_ps(_mm256_set1_ps(low), _mm256_set1_ps(high), large);
    // Minus a level where the value is positive.
    _mm256_store_ps(value, _mm256_add_ps(v, _mm256_xor_ps(level, _mm256_andnot_ps(negative, sign))));
    return _pdep_u32(uint32_t(_mm256_movemask_ps(negative)), 0x5555u) |
           _pdep_u32(uint32_t(_mm256_movemask_ps(large)), 0xaaaau);
}

// Codes of 16 values, two bits each; the values become what is left of them.
inline uint32_t code16(float* value, float border, float low, float high) {
    return code8(value, border, low, high) | code8(value + 8, border, low, high) << 16;
}

}  // namespace sparseloco::ISA_NAMESPACE

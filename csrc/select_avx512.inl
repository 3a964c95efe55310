// Steps of the selection, AVX-512. Arrays of keys are whole multiples of 32 and aligned; borders are at least 1.

namespace sparseloco::ISA_NAMESPACE {

inline uint64_t at_least(const uint16_t* keys, __m512i border) {  // one bit for each of 64 keys
    const __mmask32 low = _mm512_cmpge_epu16_mask(_mm512_load_si512(keys), border);
    const __mmask32 high = _mm512_cmpge_epu16_mask(_mm512_load_si512(keys + 32), border);
    return _cvtmask64_u64(_mm512_kunpackd(high, low));
}

inline int64_t count_keys(const uint16_t* keys, int64_t n, uint16_t border) {
    const __m512i t = _mm512_set1_epi16(short(border));
    int64_t count = 0, i = 0;
    for (; i + 64 <= n; i += 64) count += _mm_popcnt_u64(at_least(keys + i, t));
    if (i < n) count += _mm_popcnt_u32(_mm512_cmpge_epu16_mask(_mm512_load_si512(keys + i), t));
    return count;
}

// Writes the positions of keys >= border; n is a multiple of 64.
inline int64_t list_keys(const uint16_t* keys, int64_t n, uint16_t border, uint16_t* out) {
    const __m512i t = _mm512_set1_epi16(short(border));
    alignas(64) static const uint8_t kIota[64] = {
        0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
        22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
        44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    const __m512i iota = _mm512_load_si512(kIota);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 64) {
        const uint64_t mask = at_least(keys + i, t);
        // To a register first: compressing straight to memory is microcoded on some processors.
        const __m512i found = _mm512_maskz_compress_epi8(_cvtu64_mask64(mask), iota);
        const __m512i base = _mm512_set1_epi16(short(i));
        const __m512i head = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(found));
        _mm512_storeu_si512(out + count, _mm512_add_epi16(head, base));
        const int64_t more = _mm_popcnt_u64(mask);
        if (more > 32) {
            const __m512i tail = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(found, 1));
            _mm512_storeu_si512(out + count + 32, _mm512_add_epi16(tail, base));
        }
        count += more;
    }
    return count;
}

// Values at `n` positions and their magnitudes; both are filled up with zeros to a multiple of 16.
inline void fetch(const float* values, const uint16_t* index, int64_t n, uint32_t* bits, uint32_t* magnitudes) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 inside = n - i < 16 ? __mmask16((1u << (n - i)) - 1) : __mmask16(0xffff);
        const __m512i at = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(index + i)));
        const __m512i v = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), inside, at, values, 4);
        _mm512_store_si512(bits + i, v);
        _mm512_store_si512(magnitudes + i, _mm512_and_si512(v, _mm512_set1_epi32(0x7fffffff)));
    }
}

inline int64_t count_magnitudes(const uint32_t* magnitudes, int64_t n, uint32_t border) {
    const __m512i t = _mm512_set1_epi32(int(border));
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 16)
        count += _mm_popcnt_u32(_mm512_cmpge_epu32_mask(_mm512_load_si512(magnitudes + i), t));
    return count;
}

// Keeps what lies above the border and the first `equals` of what equals it; fills up with zeros to a multiple of 16.
inline void keep(const EncodeScratch& s, int64_t n, uint32_t border, int64_t equals) {
    const __m512i t = _mm512_set1_epi32(int(border));
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 16) {
        const __m512i magnitude = _mm512_load_si512(s.magnitudes + i);
        // Zeros behind the end may equal the border.
        const uint32_t inside = n - i < 16 ? (1u << (n - i)) - 1 : 0xffffu;
        const uint32_t above = _mm512_cmpgt_epu32_mask(magnitude, t);
        const uint32_t same = _mm512_cmpeq_epu32_mask(magnitude, t) & inside;
        const uint32_t first = equals < 16 ? _pdep_u32((1u << equals) - 1, same) : same;
        equals -= _mm_popcnt_u32(first);
        const __mmask16 kept = __mmask16(above | first);
        const __m256i at = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s.candidates + i));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.index + count), _mm256_maskz_compress_epi16(kept, at));
        _mm512_storeu_si512(s.value + count, _mm512_maskz_compress_epi32(kept, _mm512_load_si512(s.bits + i)));
        count += _mm_popcnt_u32(kept);
    }
    _mm512_storeu_si512(s.value + count, _mm512_setzero_si512());
}

inline uint32_t largest_magnitude(const float* value, int64_t n) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16)
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_load_si512(value + i), _mm512_set1_epi32(0x7fffffff)));
    return _mm512_reduce_max_epu32(most);
}

// Sum of floor(|value| * factor); all partial sums are whole numbers below 2^53, so the order does not matter.
inline double sum_of_floors(const float* value, int64_t n, double factor) {
    const __m512d scale = _mm512_set1_pd(factor);
    __m512d total = _mm512_setzero_pd();
    for (int64_t i = 0; i < n; i += 8) {
        const __m512d wide = _mm512_abs_pd(_mm512_cvtps_pd(_mm256_load_ps(value + i)));
        total = _mm512_add_pd(total, _mm512_roundscale_pd(_mm512_mul_pd(wide, scale), 0x0b));  // towards zero
    }
    return _mm512_reduce_add_pd(total);
}

// Codes of 16 values, two bits each; the values become what is left of them.
inline uint32_t code16(float* value, float border, float low, float high) {
    const __m512 v = _mm512_load_ps(value);
    const __mmask16 negative = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __mmask16 large = _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(border), _CMP_GT_OQ);
    const __m512 level = _mm512_mask_blend_ps(large, _mm512_set1_ps(low), _mm512_set1_ps(high));
    const __m512 minus = _mm512_xor_ps(level, _mm512_set1_ps(-0.0f));
    _mm512_store_ps(value, _mm512_add_ps(v, _mm512_mask_blend_ps(negative, minus, level)));
    return _pdep_u32(negative, 0x55555555u) | _pdep_u32(large, 0xaaaaaaaau);
}

}  // namespace sparseloco::ISA_NAMESPACE

// Error feedback of 32 values at a time, AVX-512.

namespace sparseloco::ISA_NAMESPACE {

using Keys = __m512i;  // 32 keys
inline Keys no_keys() { return _mm512_setzero_si512(); }
inline Keys larger(Keys a, Keys b) { return _mm512_max_epu16(a, b); }
inline void store_keys(uint16_t* p, Keys keys) { _mm512_store_si512(p, keys); }

inline __m512 live16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 live16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// The anchor as the live parameter was given it.
inline __m512 as_live(const float*, __m512 start) { return start; }
inline __m512 as_live(const uint16_t*, __m512 start) {
    const __m512i u = _mm512_castps_si512(start), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), one);
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(int(0xffff0000))));
}

template <typename T>
inline __m512i feedback16(const float* start, const T* live, float* residual, __m512 decay) {
    const __m512 delta = _mm512_sub_ps(as_live(live, _mm512_loadu_ps(start)), live16(live));
    const __m512 e = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(residual), decay), delta);
    _mm512_storeu_ps(residual, e);
    return _mm512_castps_si512(e);
}

template <typename T>
inline Keys feedback32(const float* start, const T* live, float* residual, float decay) {
    const __m512 factor = _mm512_set1_ps(decay);
    const __m512i a = feedback16(start, live, residual, factor);
    const __m512i b = feedback16(start + 16, live + 16, residual + 16, factor);
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_and_si512(_mm512_permutex2var_epi16(a, odd, b), _mm512_set1_epi16(0x7fff));
}

}  // namespace sparseloco::ISA_NAMESPACE

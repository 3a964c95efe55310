// Error feedback of 32 values at a time, AVX2.

namespace sparseloco::ISA_NAMESPACE {

struct Keys {  // 32 keys
    __m256i a, b;
};
inline Keys no_keys() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Keys larger(Keys x, Keys y) { return {_mm256_max_epu16(x.a, y.a), _mm256_max_epu16(x.b, y.b)}; }
inline void store_keys(uint16_t* p, Keys keys) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), keys.a);
    _mm256_store_si256(reinterpret_cast<__m256i*>(p + 16), keys.b);
}

inline __m256 live8(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 live8(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// The anchor as the live parameter was given it.
inline __m256 as_live(const float*, __m256 start) { return start; }
inline __m256 as_live(const uint16_t*, __m256 start) {
    const __m256i u = _mm256_castps_si256(start), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), one);
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(int(0xffff0000))));
}

// Returns the magnitudes' upper halves, in 32-bit lanes.
template <typename T>
inline __m256i feedback8(const float* start, const T* live, float* residual, __m256 decay) {
    const __m256 delta = _mm256_sub_ps(as_live(live, _mm256_loadu_ps(start)), live8(live));
    const __m256 e = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(residual), decay), delta);
    _mm256_storeu_ps(residual, e);
    return _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(e), 16), _mm256_set1_epi32(0x7fff));
}

template <typename T>
inline __m256i feedback16(const float* start, const T* live, float* residual, __m256 decay) {
    const __m256i a = feedback8(start, live, residual, decay);
    const __m256i b = feedback8(start + 8, live + 8, residual + 8, decay);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);  // packing works within halves
}

template <typename T>
inline Keys feedback32(const float* start, const T* live, float* residual, float decay) {
    const __m256 factor = _mm256_set1_ps(decay);
    return {feedback16(start, live, residual, factor), feedback16(start + 16, live + 16, residual + 16, factor)};
}

}  // namespace sparseloco::ISA_NAMESPACE

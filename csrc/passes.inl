// The plain pass over memory that checks a delta before anything is changed.

namespace sparseloco::ISA_NAMESPACE {

#if defined(ISA_AVX512)
constexpr int64_t kLine = 16;
using Line = __m512i;
inline Line line_zero() { return _mm512_setzero_si512(); }
inline Line line_of(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Line larger32(Line a, Line b) { return _mm512_max_epu32(a, _mm512_and_si512(b, _mm512_set1_epi32(0x7fffffff))); }
inline Line larger16(Line a, Line b) { return _mm512_max_epu16(a, _mm512_and_si512(b, _mm512_set1_epi16(0x7fff))); }
inline void line_store(uint32_t* p, Line a) { _mm512_storeu_si512(p, a); }
#elif defined(ISA_AVX2)
constexpr int64_t kLine = 8;
using Line = __m256i;
inline Line line_zero() { return _mm256_setzero_si256(); }
inline Line line_of(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Line larger32(Line a, Line b) { return _mm256_max_epu32(a, _mm256_and_si256(b, _mm256_set1_epi32(0x7fffffff))); }
inline Line larger16(Line a, Line b) { return _mm256_max_epu16(a, _mm256_and_si256(b, _mm256_set1_epi16(0x7fff))); }
inline void line_store(uint32_t* p, Line a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
#else
constexpr int64_t kLine = 1;
using Line = uint32_t;
inline Line line_zero() { return 0; }
inline Line line_of(const uint32_t* p) {
    uint32_t word;
    std::memcpy(&word, p, 4);
    return word;
}
inline Line larger32(Line a, Line b) { return a > (b & 0x7fffffffu) ? a : (b & 0x7fffffffu); }
inline Line larger16(Line a, Line b) {
    const uint32_t low = b & 0x7fffu, high = b & 0x7fff0000u;
    return ((a & 0xffffu) > low ? (a & 0xffffu) : low) | ((a & 0xffff0000u) > high ? (a & 0xffff0000u) : high);
}
inline void line_store(uint32_t* p, Line a) { *p = a; }
#endif

// Largest magnitude of `words` words; `Half`: each holds two bfloat16. Four streams, so that more of memory is at work.
template <bool Half>
uint32_t max_words(const uint32_t* p, int64_t words) {
    const auto larger = [](Line a, Line b) { return Half ? larger16(a, b) : larger32(a, b); };
    const int64_t quarter = words / (4 * kLine) * kLine;
    Line most[4] = {line_zero(), line_zero(), line_zero(), line_zero()};
    for (int64_t i = 0; i < quarter; i += kLine)
        for (int s = 0; s < 4; ++s) most[s] = larger(most[s], line_of(p + s * quarter + i));
    int64_t i = 4 * quarter;
    for (; i + kLine <= words; i += kLine) most[0] = larger(most[0], line_of(p + i));
    uint32_t lanes[4 * kLine], largest = 0;
    for (int s = 0; s < 4; ++s) line_store(lanes + s * kLine, most[s]);
    const auto fold = [&largest](uint32_t word) {
        const uint32_t high = Half ? word & 0x7fff0000u : word & 0x7fffffffu, low = Half ? word << 16 & 0x7fff0000u : 0;
        const uint32_t both = high > low ? high : low;
        largest = largest > both ? largest : both;
    };
    for (int64_t lane = 0; lane < 4 * kLine; ++lane) fold(lanes[lane]);
    for (; i < words; ++i) {
        uint32_t word;
        std::memcpy(&word, p + i, 4);
        fold(word);
    }
    return largest;
}

uint32_t max_magnitude(const void* values, bool bf16, int64_t count) {
    const auto* p = static_cast<const uint32_t*>(values);
    if (!bf16) return max_words<false>(p, count);
    uint32_t largest = max_words<true>(p, count / 2);
    if (count % 2) {
        const uint32_t last = uint32_t(static_cast<const uint16_t*>(values)[count - 1] & 0x7fff) << 16;
        largest = largest > last ? largest : last;
    }
    return largest;
}

}  // namespace sparseloco::ISA_NAMESPACE

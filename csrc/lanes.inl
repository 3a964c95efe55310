// Eight values at a time: F8 holds float32, D8 float64. Every set rounds alike, so all give the same bits.
#if defined(ISA_AVX512) || defined(ISA_AVX2)
#include <immintrin.h>
#endif

namespace sparseloco::ISA_NAMESPACE {

// Weighted sum of the values that peers sent for a coordinate, and the sum of their weights. Side by side, so that
// adding a value is one load, one addition and one store.
struct alignas(16) Pair {
    double total, weight;
};

// The value that one peer sent for a coordinate, and the peer's number plus one; no owner: nobody sent one.
struct alignas(8) Slot {
    float value;
    uint32_t owner;
};

constexpr float kLargest = 1e37f;  // channel.LARGEST: magnitudes from here on count as not finite

#if defined(ISA_AVX512)

struct F8 { __m256 v; };
struct D8 { __m512d v; };

inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F8 load(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline void store(float* p, F8 x) { _mm256_storeu_ps(p, x.v); }
inline D8 load(const double* p) { return {_mm512_loadu_pd(p)}; }
inline void store(double* p, D8 x) { _mm512_storeu_pd(p, x.v); }
inline void load(const Pair* p, D8& total, D8& weight) {
    const __m512d low = _mm512_loadu_pd(&p[0].total), high = _mm512_loadu_pd(&p[4].total);
    total.v = _mm512_permutex2var_pd(low, _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0), high);
    weight.v = _mm512_permutex2var_pd(low, _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1), high);
}
inline D8 wide(F8 x) { return {_mm512_cvtps_pd(x.v)}; }
inline F8 narrow(D8 x) { return {_mm512_cvtpd_ps(x.v)}; }
inline D8 all(double x) { return {_mm512_set1_pd(x)}; }
inline D8 operator+(D8 a, D8 b) { return {_mm512_add_pd(a.v, b.v)}; }
inline D8 operator-(D8 a, D8 b) { return {_mm512_sub_pd(a.v, b.v)}; }
inline D8 operator*(D8 a, D8 b) { return {_mm512_mul_pd(a.v, b.v)}; }
inline D8 operator/(D8 a, D8 b) { return {_mm512_div_pd(a.v, b.v)}; }
inline D8 max(D8 a, D8 b) { return {_mm512_max_pd(a.v, b.v)}; }
inline bool any(D8 x) { return _mm512_test_epi64_mask(_mm512_castpd_si512(x.v), _mm512_castpd_si512(x.v)); }
inline bool powers_of_two(D8 x) {
    return !_mm512_test_epi64_mask(_mm512_castpd_si512(x.v), _mm512_set1_epi64((int64_t(1) << 52) - 1));
}
inline D8 inverse_power(D8 x) {
    const __m512i flipped = _mm512_sub_epi64(_mm512_set1_epi64(int64_t(2046) << 52), _mm512_castpd_si512(x.v));
    return {_mm512_castsi512_pd(flipped)};
}

#elif defined(ISA_AVX2)

struct F8 { __m256 v; };
struct D8 { __m256d a, b; };

inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F8 load(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline void store(float* p, F8 x) { _mm256_storeu_ps(p, x.v); }
inline D8 load(const double* p) { return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}; }
inline void store(double* p, D8 x) {
    _mm256_storeu_pd(p, x.a);
    _mm256_storeu_pd(p + 4, x.b);
}
inline void split(const Pair* p, __m256d& total, __m256d& weight) {
    const __m256d low = _mm256_loadu_pd(&p[0].total), high = _mm256_loadu_pd(&p[2].total);
    total = _mm256_permute4x64_pd(_mm256_unpacklo_pd(low, high), 0xd8);
    weight = _mm256_permute4x64_pd(_mm256_unpackhi_pd(low, high), 0xd8);
}
inline void load(const Pair* p, D8& total, D8& weight) {
    split(p, total.a, weight.a);
    split(p + 4, total.b, weight.b);
}
inline D8 wide(F8 x) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x.v)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1))};
}
inline F8 narrow(D8 x) { return {_mm256_set_m128(_mm256_cvtpd_ps(x.b), _mm256_cvtpd_ps(x.a))}; }
inline D8 all(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline D8 operator+(D8 x, D8 y) { return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b)}; }
inline D8 operator-(D8 x, D8 y) { return {_mm256_sub_pd(x.a, y.a), _mm256_sub_pd(x.b, y.b)}; }
inline D8 operator*(D8 x, D8 y) { return {_mm256_mul_pd(x.a, y.a), _mm256_mul_pd(x.b, y.b)}; }
inline D8 operator/(D8 x, D8 y) { return {_mm256_div_pd(x.a, y.a), _mm256_div_pd(x.b, y.b)}; }
inline D8 max(D8 x, D8 y) { return {_mm256_max_pd(x.a, y.a), _mm256_max_pd(x.b, y.b)}; }
inline __m256i either(D8 x) { return _mm256_or_si256(_mm256_castpd_si256(x.a), _mm256_castpd_si256(x.b)); }
inline bool any(D8 x) { return !_mm256_testz_si256(either(x), either(x)); }
inline bool powers_of_two(D8 x) {
    return _mm256_testz_si256(either(x), _mm256_set1_epi64x((int64_t(1) << 52) - 1));
}
inline __m256d inverse_power(__m256d x) {
    const __m256i two = _mm256_set1_epi64x(int64_t(2046) << 52);
    return _mm256_castsi256_pd(_mm256_sub_epi64(two, _mm256_castpd_si256(x)));
}
inline D8 inverse_power(D8 x) { return {inverse_power(x.a), inverse_power(x.b)}; }

#else

struct F8 { float v[8]; };
struct D8 { double v[8]; };

template <typename Out, typename F>
inline Out lanes(const F& of) {
    Out out;
    for (int i = 0; i < 8; ++i) out.v[i] = of(i);
    return out;
}

inline F8 load(const float* p) { return lanes<F8>([&](int i) { return p[i]; }); }
inline F8 load(const uint16_t* p) { return lanes<F8>([&](int i) { return widen(p[i]); }); }
inline void store(float* p, F8 x) { std::memcpy(p, x.v, sizeof x.v); }
inline D8 load(const double* p) { return lanes<D8>([&](int i) { return p[i]; }); }
inline void store(double* p, D8 x) { std::memcpy(p, x.v, sizeof x.v); }
inline void load(const Pair* p, D8& total, D8& weight) {
    total = lanes<D8>([&](int i) { return p[i].total; });
    weight = lanes<D8>([&](int i) { return p[i].weight; });
}
inline D8 wide(F8 x) { return lanes<D8>([&](int i) { return double(x.v[i]); }); }
inline F8 narrow(D8 x) { return lanes<F8>([&](int i) { return float(x.v[i]); }); }
inline D8 all(double x) { return lanes<D8>([&](int) { return x; }); }
inline D8 operator+(D8 a, D8 b) { return lanes<D8>([&](int i) { return a.v[i] + b.v[i]; }); }
inline D8 operator-(D8 a, D8 b) { return lanes<D8>([&](int i) { return a.v[i] - b.v[i]; }); }
inline D8 operator*(D8 a, D8 b) { return lanes<D8>([&](int i) { return a.v[i] * b.v[i]; }); }
inline D8 operator/(D8 a, D8 b) { return lanes<D8>([&](int i) { return a.v[i] / b.v[i]; }); }
inline D8 max(D8 a, D8 b) { return lanes<D8>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline bool any(D8 x) {
    uint64_t seen = 0, bits;
    for (double one : x.v) {
        std::memcpy(&bits, &one, 8);
        seen |= bits;
    }
    return seen != 0;
}
// Division is not so much slower here that it would be worth going around it.
inline bool powers_of_two(D8) { return false; }
inline D8 inverse_power(D8 x) { return x; }

#endif

#if defined(ISA_AVX512) || defined(ISA_AVX2)

// Whether all magnitudes are below kLargest; false for NaN.
inline bool sane(F8 x) {
    const __m256 magnitude = _mm256_and_ps(x.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
    return _mm256_movemask_ps(_mm256_cmp_ps(magnitude, _mm256_set1_ps(kLargest), _CMP_LT_OQ)) == 0xff;
}
// Rounded as common.h's to_bf16.
inline __m128i bf16_of(F8 x) {
    const __m256i bits = _mm256_castps_si256(x.v), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0),
                                               _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q)));
    const __m256i packed = _mm256_packus_epi32(rounded, rounded);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store(uint16_t* p, F8 x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bf16_of(x)); }
inline void fence() { _mm_sfence(); }

#else

inline bool sane(F8 x) {
    bool all = true;
    for (float one : x.v) all &= (one < 0 ? -one : one) < kLargest;
    return all;
}
inline void store(uint16_t* p, F8 x) {
    for (int i = 0; i < 8; ++i) p[i] = to_bf16(x.v[i]);
}
inline void fence() {}

#endif

// -- sixteen float32 -------------------------------------------------------------------------------------------------

#if defined(ISA_AVX512)

struct F16 { __m512 v; };

inline F16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
// Rows of ragged tiles start anywhere in a window, so nothing is aligned.
inline F16 load16(const Slot* p) {
    const __m512 low = _mm512_loadu_ps(p), high = _mm512_loadu_ps(p + 8);
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return {_mm512_permutex2var_ps(low, even, high)};
}
inline void store16(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline void clear16(Slot* p) {
    _mm512_storeu_ps(p, _mm512_setzero_ps());
    _mm512_storeu_ps(p + 8, _mm512_setzero_ps());
}
inline F8 low(F16 x) { return {_mm512_castps512_ps256(x.v)}; }
inline F8 high(F16 x) { return {_mm512_extractf32x8_ps(x.v, 1)}; }
inline F16 join(F8 a, F8 b) { return {_mm512_insertf32x8(_mm512_castps256_ps512(a.v), b.v, 1)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline bool sane(F16 x) {
    return _mm512_cmp_ps_mask(_mm512_abs_ps(x.v), _mm512_set1_ps(kLargest), _CMP_LT_OQ) == 0xffff;
}

#else

struct F16 { F8 a, b; };

inline F16 load16(const float* p) { return {load(p), load(p + 8)}; }
#ifdef ISA_AVX2
inline F8 values8(const Slot* p) {
    const __m256 low = _mm256_loadu_ps(&p[0].value), high = _mm256_loadu_ps(&p[4].value);
    const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0x88));
    return {_mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8))};
}
inline F8 operator-(F8 x, F8 y) { return {_mm256_sub_ps(x.v, y.v)}; }
#else
inline F8 values8(const Slot* p) { return lanes<F8>([&](int i) { return p[i].value; }); }
inline F8 operator-(F8 x, F8 y) { return lanes<F8>([&](int i) { return x.v[i] - y.v[i]; }); }
#endif
inline F16 load16(const Slot* p) { return {values8(p), values8(p + 8)}; }
inline void store16(float* p, F16 x) {
    store(p, x.a);
    store(p + 8, x.b);
}
inline void clear16(Slot* p) { std::memset(static_cast<void*>(p), 0, 16 * sizeof(Slot)); }
inline F8 low(F16 x) { return x.a; }
inline F8 high(F16 x) { return x.b; }
inline F16 join(F8 a, F8 b) { return {a, b}; }
inline F16 operator-(F16 x, F16 y) { return {x.a - y.a, x.b - y.b}; }
inline bool sane(F16 x) { return sane(x.a) && sane(x.b); }

#endif

// Past the caches; whole lines of 64 bytes only, or they are slow.
#if defined(ISA_AVX512)
inline void stream16(float* p, F16 x) { _mm512_stream_ps(p, x.v); }
#elif defined(ISA_AVX2)
inline void stream16(float* p, F16 x) {
    _mm256_stream_ps(p, x.a.v);
    _mm256_stream_ps(p + 8, x.b.v);
}
#else
template <typename T>
inline void stream16(T* p, F16 x) {
    store(p, x.a);
    store(p + 8, x.b);
}
#endif
#if defined(ISA_AVX512) || defined(ISA_AVX2)
inline void stream16(uint16_t* p, F16 x) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), bf16_of(low(x)));
    _mm_stream_si128(reinterpret_cast<__m128i*>(p + 8), bf16_of(high(x)));
}
#endif

// One order for every set.
inline double sum(D8 x) {
    double v[8];
    store(v, x);
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

}  // namespace sparseloco::ISA_NAMESPACE

// Sums for the digest: each word times the odd factor of its place in a run of 64, each run times its own. Products of
// 32-bit numbers need no wide multiplication, so this costs little more than reading the words.
#if defined(ISA_AVX512) || defined(ISA_AVX2)
#include <immintrin.h>
#endif

namespace sparseloco::ISA_NAMESPACE {

#if defined(ISA_AVX512)

// Sums of both lanes, spread over eight places that are added up at the end of the row.
struct RunSums {
    __m512i even[2][4], odd[2][4];  // factors, in the low half of each 64 bits
    __m512i total[2];

    explicit RunSums(const DigestFactors& factors) {
        for (int lane = 0; lane < 2; ++lane) {
            total[lane] = _mm512_setzero_si512();
            for (int i = 0; i < 4; ++i) {
                even[lane][i] = _mm512_load_si512(factors.place[lane] + 16 * i);
                odd[lane][i] = _mm512_srli_epi64(even[lane][i], 32);
            }
        }
    }

    inline void add(const uint32_t* words, int64_t run) {
        __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int i = 0; i < 4; ++i) {
            const __m512i low = _mm512_loadu_si512(words + 16 * i), high = _mm512_srli_epi64(low, 32);
            for (int lane = 0; lane < 2; ++lane) {
                sum[lane] = _mm512_add_epi64(sum[lane], _mm512_mul_epu32(low, even[lane][i]));
                sum[lane] = _mm512_add_epi64(sum[lane], _mm512_mul_epu32(high, odd[lane][i]));
            }
        }
        for (int lane = 0; lane < 2; ++lane) {
            const __m512i factor = _mm512_set1_epi64(int64_t(run_factor(run, lane)));
            total[lane] = _mm512_add_epi64(total[lane], _mm512_mullo_epi64(sum[lane], factor));
        }
    }

    // Modulo 2^64, which signed numbers, those of the compiler's own reduction, may not be.
    inline uint64_t lane(int i) const {
        alignas(64) uint64_t parts[8];
        _mm512_store_si512(parts, total[i]);
        uint64_t sum = 0;
        for (const uint64_t part : parts) sum += part;
        return sum;
    }
};

#elif defined(ISA_AVX2)

struct RunSums {
    const DigestFactors& factors;
    uint64_t total[2] = {0, 0};

    explicit RunSums(const DigestFactors& f) : factors(f) {}

    inline void add(const uint32_t* words, int64_t run) {
        __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (int i = 0; i < 8; ++i) {
            const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + 8 * i));
            const __m256i high = _mm256_srli_epi64(low, 32);
            for (int lane = 0; lane < 2; ++lane) {
                const __m256i even = _mm256_load_si256(
                    reinterpret_cast<const __m256i*>(factors.place[lane] + 8 * i));
                sum[lane] = _mm256_add_epi64(sum[lane], _mm256_mul_epu32(low, even));
                sum[lane] = _mm256_add_epi64(sum[lane], _mm256_mul_epu32(high, _mm256_srli_epi64(even, 32)));
            }
        }
        for (int lane = 0; lane < 2; ++lane) {
            alignas(32) uint64_t part[4];
            _mm256_store_si256(reinterpret_cast<__m256i*>(part), sum[lane]);
            total[lane] += (part[0] + part[1] + part[2] + part[3]) * run_factor(run, lane);
        }
    }

    inline uint64_t lane(int i) const { return total[i]; }
};

#else

struct RunSums {
    const DigestFactors& factors;
    uint64_t total[2] = {0, 0};

    explicit RunSums(const DigestFactors& f) : factors(f) {}

    inline void add(const uint32_t* words, int64_t run) {
        uint64_t sum[2] = {0, 0};
        for (int i = 0; i < kDigestRun; ++i)
            for (int lane = 0; lane < 2; ++lane) sum[lane] += uint64_t(words[i]) * factors.place[lane][i];
        for (int lane = 0; lane < 2; ++lane) total[lane] += sum[lane] * run_factor(run, lane);
    }

    inline uint64_t lane(int i) const { return total[i]; }
};

#endif

inline void digest_row(const uint32_t* words, int64_t count, int64_t first_run, const DigestFactors& factors,
                       uint64_t* lanes) {
    RunSums sums(factors);
    int64_t at = 0;
    for (; at + kDigestRun <= count; at += kDigestRun) sums.add(words + at, first_run++);
    if (at < count) {
        uint32_t rest[kDigestRun] = {};
        std::memcpy(rest, words + at, size_t(count - at) * sizeof(uint32_t));
        sums.add(rest, first_run);
    }
    for (int lane = 0; lane < 2; ++lane) lanes[lane] = sums.lane(lane);
}

}  // namespace sparseloco::ISA_NAMESPACE

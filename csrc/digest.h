// The digest of shared state; bits.digest_lanes is the definition.
#pragma once

#include "common.h"

namespace sparseloco {

constexpr int kDigestRun = 64;  // neighbours in a row that share a factor

// Odd 32-bit factors of the places in a run, for both lanes.
struct DigestFactors {
    alignas(64) uint32_t place[2][kDigestRun];
};
const DigestFactors& digest_factors();

// SplitMix64's finaliser, as keys.mix64.
SPARSELOCO_INLINE uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
SPARSELOCO_INLINE uint64_t run_factor(int64_t run, int lane) { return mix64(~uint64_t(2 * run + lane)) | 1; }
SPARSELOCO_INLINE uint64_t row_factor(uint64_t row, int lane) { return mix64(2 * row + uint64_t(lane)) | 1; }

struct DigestKernels {
    // Both sums over `count` neighbours in a row, the first of them at the start of a run.
    void (*row)(const uint32_t* words, int64_t count, int64_t first_run, const DigestFactors& factors, uint64_t* lanes);
};

// Lanes of a contiguous matrix of 4-byte words.
void digest(const uint32_t* words, int64_t rows, int64_t cols, uint64_t salt, int threads, uint64_t* lanes);

}  // namespace sparseloco

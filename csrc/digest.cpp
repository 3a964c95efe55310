#include "digest.h"

#include <algorithm>
#include <atomic>

#include "kernels.h"

namespace sparseloco {

const DigestFactors& digest_factors() {
    static const DigestFactors factors = [] {
        DigestFactors made;
        // Counted from the lowest number, where neither rows (from 0 up) nor runs (from -1 down) come.
        for (int lane = 0; lane < 2; ++lane)
            for (int i = 0; i < kDigestRun; ++i)
                made.place[lane][i] = uint32_t(mix64((uint64_t(1) << 63) + uint64_t(2 * i + lane)) >> 32) | 1;
        return made;
    }();
    return factors;
}

void digest(const uint32_t* words, int64_t rows, int64_t cols, uint64_t salt, int threads, uint64_t* lanes) {
    constexpr int64_t kPiece = 1 << 16;  // of a long row
    const int64_t pieces = (cols + kPiece - 1) / kPiece;
    const int64_t step = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, cols));
    const int64_t strips = (rows + step - 1) / step;
    std::atomic<uint64_t> sum[2] = {{0}, {0}};  // in any order: they wrap
    parallel_for(strips * pieces, threads, [&](int64_t task) {
        const int64_t piece = task % pieces, first = task / pieces * step, last = std::min(rows, first + step);
        const int64_t start = piece * kPiece, count = std::min(kPiece, cols - start);
        uint64_t part[2] = {0, 0}, row[2];
        for (int64_t n = first; n < last; ++n) {
            kernels().digest.row(words + n * cols + start, count, start / kDigestRun, digest_factors(), row);
            // Lane 1 counts rows, so that zeros of different shapes differ.
            if (piece == 0) row[1] += 1;
            for (int lane = 0; lane < 2; ++lane) part[lane] += row[lane] * row_factor(salt + uint64_t(n), lane);
        }
        for (int lane = 0; lane < 2; ++lane) sum[lane] += part[lane];
    });
    for (int lane = 0; lane < 2; ++lane) lanes[lane] = sum[lane].load();
}

}  // namespace sparseloco

// Decode, mean, outer step, merge and write of the live parameter in one pass over memory.
#pragma once

#include <vector>

#include "gaps.h"

namespace sparseloco {

enum class Mean : int { PEERS = 0, CONTRIBUTORS = 1 };
enum class Merge : int { REPLACE = 0, BLEND = 1, CARRY = 2 };

// What all jobs of a call share.
struct SettlePlan {
    const int64_t* weights;  // of the peers, in peer order
    int64_t peers;
    int64_t total_weight;
    float low, high;  // levels of the values
    Mean over;
    double lr, momentum, decay;  // float32 values; decay is what the anchor is multiplied by, 1 for none
    bool nesterov;
    bool general;  // momentum or decay: every coordinate moves
    Merge merge;
    double alpha;  // of the live values, for BLEND
};

// One block.
struct SettleJob {
    GapShape shape;
    Geometry where;
    float* anchor;         // [N, C]
    float* velocity;       // [N, C], or null without momentum
    void* live;            // float32 or bfloat16, strided as `where` says
    const void* snapshot;  // like live; for CARRY
    bool bf16;
    const Section* sections;  // one per peer
};

struct SettleKernels {
    // Groups [first, last). False if an anchor would leave the range of numbers; that vector is then not written.
    // `square` receives the sum of squares of the update; its order of summation is that of the values in memory.
    bool (*settle)(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square);
    // Reads and writes the anchor, writes the live parameter: what any settle costs at least.
    void (*apply)(const SettleJob& job, int64_t first, int64_t last);
};

struct Settled {
    int64_t failed = -1;  // first job with an anchor that would leave the range of numbers
    std::vector<double> squares;
};

Settled settle_all(const SettlePlan& plan, const std::vector<SettleJob>& jobs, int threads);
void apply_all(const std::vector<SettleJob>& jobs, int threads);

}  // namespace sparseloco

// What the encoder is asked for, and where the parts of a section lie in the fixed coding (docs/wire-format.md).
#pragma once

#include "common.h"
#include "gaps.h"

namespace sparseloco {

constexpr int64_t kLargestChunk = 32768;  // positions and gaps are 16 bits wide in here

// The fixed coding of one block, where a thread can write a group without knowing the others: low bits, unary slots,
// 2-bit codes, bfloat16 scales.
struct FixedSection : GapShape {
    using GapShape::GapShape;

    // Of g chunks; a whole group starts on a byte in every part.
    SPARSELOCO_INLINE int64_t low_bytes_of(int64_t g) const { return (g * kept * low_bits + 7) / 8; }
    SPARSELOCO_INLINE int64_t code_bytes_of(int64_t g) const { return (g * kept * 2 + 7) / 8; }

    // Where the parts start; the low stream starts at 0.
    SPARSELOCO_INLINE int64_t unary_at() const { return low_bytes(); }
    SPARSELOCO_INLINE int64_t code_at() const { return fixed_bytes(); }
    SPARSELOCO_INLINE int64_t scale_at() const { return code_at() + code_bytes(); }
    SPARSELOCO_INLINE int64_t bytes() const { return scale_at() + 2 * chunks; }
};

// One block: its chunks in the anchor, the live parameter and the residual, and its section.
struct EncodeJob {
    const float* start;  // [N, C]
    const void* live;    // float32 or bfloat16, strided as `where` says
    bool bf16;
    float* residual;  // [N, C], in place; null: what is not sent is forgotten
    Geometry where;
    FixedSection section;
    uint8_t* out;  // section.bytes()
};

struct EncodeRule {
    float decay;              // of the residual
    float low, high, middle;  // levels of a code, and the border between them, in units of the scale
};

// Memory of one thread. Arrays of a chunk have room for C rounded up to 64, and 64 more.
struct EncodeScratch {
    uint16_t* keys;         // upper half of each magnitude's bits
    uint16_t* maxima;       // largest key of each lane of a few neighbouring vectors of keys
    uint16_t* candidates;   // positions that may be kept
    uint32_t* bits;         // their values
    uint32_t* magnitudes;   // the same without sign
    uint16_t* index;        // kept positions; index[-1] is writable
    float* value;           // kept values
    float* start;           // copies of ragged rows
    float* live;
    float* residual;
    int64_t* block_offset;  // of each run of 32 values of a chunk in the live parameter
    uint8_t* low;           // streams of the group
    uint8_t* unary;
    uint8_t* code;
    uint16_t threshold;     // key of the last chunk's border, where the search of the next one starts
};

struct EncodeKernels {
    // Largest magnitude, its bits, of consecutive values; NaN lies above infinity.
    uint32_t (*max_magnitude)(const void* values, bool bf16, int64_t count);
    // residual <- decay * residual + (start - live) of some chunks and nothing else: what an encoder costs at least.
    void (*ef_pass)(const EncodeJob& job, float decay, int64_t first, int64_t last, EncodeScratch& scratch);
    // Encodes groups [first, last).
    void (*encode)(const EncodeJob& job, const EncodeRule& rule, int64_t first, int64_t last, EncodeScratch& scratch);
};

// Spread over threads, in encode.cpp.
struct Values {
    const void* data;
    bool bf16;
    int64_t rows, cols, row_stride;
};
void max_magnitudes(const Values* jobs, int64_t count, int threads, uint32_t* bits);
void ef_passes(const EncodeJob* jobs, int64_t count, float decay, int threads);
void encode_all(const EncodeJob* jobs, int64_t count, const EncodeRule& rule, int threads);

}  // namespace sparseloco

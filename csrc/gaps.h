// Gap-coded positions: sizes that follow from N, K and C, and where the streams of one section lie
// (docs/wire-format.md). N chunks of C values, K positions in each.
#pragma once

#include <memory>

#include "common.h"

namespace sparseloco {

enum class Coding : int { FIXED = 0, COMPACT = 1 };

struct GapShape {
    int64_t chunks = 0, kept = 1, chunk = 1;  // N, K, C
    int64_t per_group = 8;                    // chunks of a whole group
    int low_bits = 0;                         // of a gap; the rest is unary

    GapShape() = default;
    GapShape(int64_t n, int64_t k, int64_t c) : chunks(n), kept(k), chunk(c), per_group(8 * ((128 + k - 1) / k)) {
        for (int b = 1; b < 32; ++b)
            if (cost(b) < cost(low_bits)) low_bits = b;
    }

    SPARSELOCO_INLINE int64_t groups() const { return (chunks + per_group - 1) / per_group; }
    SPARSELOCO_INLINE int64_t in_group(int64_t group) const {
        const int64_t rest = chunks - group * per_group;
        return rest < per_group ? rest : per_group;
    }
    // Largest bytes of the unary stream of g chunks, and the least: K one bits a chunk.
    SPARSELOCO_INLINE int64_t slot(int64_t g) const { return (g * (kept + ((chunk - kept) >> low_bits)) + 7) / 8; }
    SPARSELOCO_INLINE int64_t least(int64_t g) const { return (g * kept + 7) / 8; }
    SPARSELOCO_INLINE int64_t low_bytes() const { return (chunks * kept * low_bits + 7) / 8; }
    SPARSELOCO_INLINE int64_t code_bytes() const { return (chunks * kept * 2 + 7) / 8; }
    SPARSELOCO_INLINE int64_t slots() const { return groups() ? (groups() - 1) * slot(per_group) + last_slot() : 0; }
    SPARSELOCO_INLINE int64_t fixed_bytes() const { return low_bytes() + slots(); }
    SPARSELOCO_INLINE int entry_bytes() const { return slot(per_group) <= 65535 ? 2 : 4; }
    SPARSELOCO_INLINE int64_t table_bytes() const { return groups() * entry_bytes(); }

  private:
    SPARSELOCO_INLINE int64_t cost(int b) const { return kept * b + kept + ((chunk - kept) >> b); }
    SPARSELOCO_INLINE int64_t last_slot() const { return slot(in_group(groups() - 1)); }
};

// What is wrong with bytes from outside, and at which group, chunk or byte.
struct Fault {
    enum Code : int {
        NONE = 0,
        TABLE_SHORT,    // fewer bytes than the table of groups has
        TABLE_ENTRY,    // a group says a size that it cannot have
        LENGTH,         // too few or too many bytes
        LOW_PADDING,    // bits behind the last low value
        GROUP,          // not K one bits for each chunk, or bits behind the last one, or a last byte of zero
        POSITION,       // a chunk's last position is not below C
        CODE_PADDING,   // bits behind the last code
        SCALE,          // not finite, or too large
        SCALE_SIGN,     // with a minus sign
    };
    int code = NONE;
    int64_t at = 0;
};

// Bytes of one block from one peer. Bytes from outside may be wrong in every way that `check` finds, but once
// `open_section` has found nothing, all pointers lie inside of them.
struct Section {
    GapShape shape;
    Coding coding = Coding::FIXED;
    const uint8_t* low = nullptr;
    const uint8_t* unary = nullptr;
    const uint8_t* code = nullptr;   // null: nothing behind the positions
    const uint8_t* scale = nullptr;  // bfloat16, not aligned
    const uint8_t* end = nullptr;    // of all bytes that may be read
    const int64_t* starts = nullptr;  // of the groups in `unary`, and the end of the last; null in the fixed coding
    std::shared_ptr<int64_t[]> memory;

    SPARSELOCO_INLINE int64_t start(int64_t group) const {
        return starts ? starts[group] : group * shape.slot(shape.per_group);
    }
    SPARSELOCO_INLINE int64_t stop(int64_t group) const {
        return starts ? starts[group + 1] : start(group) + shape.slot(shape.in_group(group));
    }
};

struct GapKernels {
    // First fault of groups [first, last), with the codes and scales of their chunks if the section has some.
    Fault (*check)(const Section& section, int64_t first, int64_t last);
    // Positions of groups [first, last) as int16 or int32 [N, K].
    void (*unpack)(const Section& section, int64_t first, int64_t last, bool wide, void* index);
};

// Finds the streams. `values`: 2-bit codes and bfloat16 scales follow the positions, else nothing does.
Fault open_section(const uint8_t* data, int64_t bytes, const GapShape& shape, Coding coding, bool values, Section* out);

// A section and its first fault; `first` is the section's number.
struct Checked {
    int64_t section = -1;
    Fault fault;
};
Checked check_sections(const Section* sections, int64_t count, int threads);

void unpack_index(const Section& section, bool wide, void* index, int threads);

// Fixed coding of positions [N, K] into zeroed bytes. Returns the first chunk whose positions do not ascend below C,
// or -1.
int64_t pack_fixed(const void* index, bool wide, const GapShape& shape, uint8_t* out, int threads);

// The same positions in the other coding; `out` has room for table_bytes() + fixed_bytes(). Returns the size.
int64_t recode(const Section& section, uint8_t* out);

}  // namespace sparseloco

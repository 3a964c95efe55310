// Streams of a group: packed codes and low bits, and unary upper parts of the gaps.

namespace sparseloco::ISA_NAMESPACE {

// Appends bits, least significant first; writes up to eight bytes past its end.
struct BitWriter {
    uint8_t* next;
    uint64_t pending = 0;  // fewer than 8 bits
    int fill = 0;

    // `count` is at most 56, and `bits` has no others.
    void append(uint64_t bits, int count) {
        pending |= bits << fill;
        std::memcpy(next, &pending, 8);  // little endian, as all machines that this is built for
        fill += count;
        next += fill >> 3;
        pending >>= fill & ~7;
        fill &= 7;
    }
};

struct GroupWriter {
    BitWriter low, code, unary;
};

#if defined(ISA_SCALAR)
inline void append_low(BitWriter& out, const uint16_t* index, int64_t kept, int bits) {
    const uint16_t mask = uint16_t((1u << bits) - 1);
    for (int64_t j = 0; j < kept; ++j) out.append(uint16_t(index[j] - index[j - 1] - 1) & mask, bits);
}
#else
// Low bits of eight gaps, packed.
inline uint64_t low8(const uint16_t* index, int64_t count, int bits) {
    const __m128i here = _mm_loadu_si128(reinterpret_cast<const __m128i*>(index));
    const __m128i before = _mm_loadu_si128(reinterpret_cast<const __m128i*>(index - 1));
    const __m128i gap = _mm_add_epi16(_mm_sub_epi16(here, before), _mm_set1_epi16(-1));
    const __m128i bytes = _mm_packus_epi16(_mm_and_si128(gap, _mm_set1_epi16(0x7f)), gap);
    const uint64_t lanes = count < 8 ? (uint64_t(1) << 8 * count) - 1 : ~uint64_t(0);
    return _pext_u64(uint64_t(_mm_cvtsi128_si64(bytes)) & lanes, 0x0101010101010101u * ((1u << bits) - 1));
}

inline void append_low(BitWriter& out, const uint16_t* index, int64_t kept, int bits) {
    if (bits > 7) {
        const uint16_t mask = uint16_t((1u << bits) - 1);
        for (int64_t j = 0; j < kept; ++j) out.append(uint16_t(index[j] - index[j - 1] - 1) & mask, bits);
        return;
    }
    for (int64_t j = 0; j < kept; j += 8) {
        const int64_t count = kept - j < 8 ? kept - j : 8;
        out.append(low8(index + j, count, bits), int(count) * bits);
    }
}
#endif

inline uint32_t gap_at(const uint16_t* index, int64_t j) { return uint16_t(index[j] - index[j - 1] - 1); }

// `zeros` zero bits, then a one.
inline void append_unary(BitWriter& out, uint32_t zeros) {
    for (; zeros > 55; zeros -= 55) out.append(0, 55);
    out.append(uint64_t(1) << zeros, int(zeros) + 1);
}

inline void append_upper(BitWriter& out, const uint16_t* index, int64_t kept, int bits) {
    int64_t j = 0;
    for (; j + 4 <= kept; j += 4) {
        // Places of four ones behind each other, made at once: the writer is one long chain of dependent steps.
        const uint32_t a = gap_at(index, j) >> bits, b = a + 1 + (gap_at(index, j + 1) >> bits);
        const uint32_t c = b + 1 + (gap_at(index, j + 2) >> bits), d = c + 1 + (gap_at(index, j + 3) >> bits);
        if (d < 56) {
            const uint64_t one = 1;
            out.append(one << a | one << b | one << c | one << d, int(d) + 1);
        } else {
            for (int64_t i = j; i < j + 4; ++i) append_unary(out, gap_at(index, i) >> bits);
        }
    }
    for (; j < kept; ++j) append_unary(out, gap_at(index, j) >> bits);
}

// Writes the gaps of one chunk; `index` holds its positions, with room before and behind them.
inline void append_gaps(GroupWriter& out, uint16_t* index, const FixedSection& section) {
    index[-1] = 0xffff;  // -1
    const int bits = section.low_bits;
    if (bits) append_low(out.low, index, section.kept, bits);
    append_upper(out.unary, index, section.kept, bits);
}

}  // namespace sparseloco::ISA_NAMESPACE

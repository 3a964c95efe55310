// Checks of bytes from outside: all that docs/wire-format.md says of positions, 2-bit codes and scales.

namespace sparseloco::ISA_NAMESPACE {

constexpr uint16_t kLargestScale = 0x7cf0;  // the largest bfloat16 below 1e37

// Place of the n-th one bit of a word, n from 0; the word has more than n.
inline int64_t select_one(uint64_t word, int64_t n) {
#if defined(ISA_AVX512) || defined(ISA_AVX2)
    return int64_t(_tzcnt_u64(_pdep_u64(uint64_t(1) << n, word)));
#else
    for (; n > 0; --n) word &= word - 1;
    return __builtin_ctzll(word);
#endif
}

// Moves behind the next `count` one bits; false if the group has fewer.
inline bool skip_ones(Reader& r, int64_t count) {
    for (int64_t bit = r.unary_bit; bit < r.unary_limit; bit += 64) {
        uint64_t word = bits_at(r.unary, r.end, bit);
        if (r.unary_limit - bit < 64) word &= (uint64_t(1) << (r.unary_limit - bit)) - 1;
        const int64_t ones = __builtin_popcountll(word);
        if (ones >= count) {
            r.unary_bit = bit + select_one(word, count - 1) + 1;
            return true;
        }
        count -= ones;
    }
    return false;
}

// Sum of the next `count` low values.
inline int64_t sum_lows(Reader& r, int64_t count) {
    int64_t sum = 0;
    for (int64_t done = 0; done < count; done += kBatch) {
        const int n = int(count - done < kBatch ? count - done : kBatch);
#ifdef ISA_AVX512
        if (r.low_bits <= 8) {
            const __m512i lows = _mm512_maskz_mov_epi8(_bzhi_u64(~uint64_t(0), unsigned(n)), take_lows(r, n));
            sum += _mm512_reduce_add_epi64(_mm512_sad_epu8(lows, _mm512_setzero_si512()));
            continue;
        }
#endif
        each_low(r, n, [&](int, uint64_t low) { sum += int64_t(low); });
    }
    return sum;
}

inline bool all_zero(const uint8_t* from, const uint8_t* to) {
    for (; to - from >= 8; from += 8) {
        uint64_t word;
        std::memcpy(&word, from, 8);
        if (word) return false;
    }
    while (from < to)
        if (*from++) return false;
    return true;
}

// Nothing but zeros behind the last one bit; in the compact coding not even a byte of them.
inline bool ends_well(const Reader& r, const Section& section) {
    const uint8_t* last = r.unary + ((r.unary_bit - 1) >> 3);
    if (uint32_t(*last) >> (((r.unary_bit - 1) & 7) + 1)) return false;
    const uint8_t* end = r.unary + (r.unary_limit >> 3);
    return section.coding == Coding::COMPACT ? last + 1 == end : all_zero(last + 1, end);
}

inline Fault check_positions(const Section& section, int64_t group, Reader& r) {
    const GapShape& shape = section.shape;
    open_group(r, section, group);
    for (int64_t n = 0; n < shape.in_group(group); ++n) {
        const int64_t start = r.unary_bit;
        if (!skip_ones(r, shape.kept)) return {Fault::GROUP, group};
        const int64_t zeros = r.unary_bit - start - shape.kept;
        const int64_t last = (zeros << shape.low_bits) + sum_lows(r, shape.kept) + shape.kept - 1;
        if (last >= shape.chunk) return {Fault::POSITION, group * shape.per_group + n};
    }
    return ends_well(r, section) ? Fault{} : Fault{Fault::GROUP, group};
}

inline Fault check_scales(const Section& section, int64_t first, int64_t last) {
    uint16_t largest = 0;
    for (int64_t n = first; n < last; ++n) {
        uint16_t scale;
        std::memcpy(&scale, section.scale + 2 * n, 2);
        largest = scale > largest ? scale : largest;
    }
    if (largest <= kLargestScale) return {};  // unsigned: a minus sign is larger than all, too
    for (int64_t n = first; n < last; ++n) {
        uint16_t scale;
        std::memcpy(&scale, section.scale + 2 * n, 2);
        if ((scale & 0x7fff) > kLargestScale) return {Fault::SCALE, n};
        if (scale & 0x8000) return {Fault::SCALE_SIGN, n};
    }
    return {};
}

// Bits behind the last of a packed part.
inline bool padded(const uint8_t* part, int64_t bits) { return (bits & 7) && part[bits >> 3] >> (bits & 7); }

inline Fault check_gaps(const Section& section, int64_t first, int64_t last) {
    const GapShape& shape = section.shape;
    const bool at_end = last == shape.groups();
    if (at_end && padded(section.low, shape.chunks * shape.kept * shape.low_bits)) return {Fault::LOW_PADDING, 0};
    Reader r = reader_of(section);
    for (int64_t group = first; group < last; ++group) {
        const Fault fault = check_positions(section, group, r);
        if (fault.code) return fault;
    }
    if (!section.code) return {};
    if (at_end && padded(section.code, shape.chunks * shape.kept * 2)) return {Fault::CODE_PADDING, 0};
    return check_scales(section, first * shape.per_group, at_end ? shape.chunks : last * shape.per_group);
}

}  // namespace sparseloco::ISA_NAMESPACE

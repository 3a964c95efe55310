// Decoding of gap-coded positions. Runs of n positions, whole chunks or pieces of one, are taken several at a time:
// idx_j = base + ((zeros before the run's j-th one bit) << b) + (low values up to j) + j.
#if defined(ISA_AVX512) || defined(ISA_AVX2)
#include <immintrin.h>
#endif

namespace sparseloco::ISA_NAMESPACE {

constexpr int kBatch = 64;              // positions in a vector of bytes
constexpr int kTaken = 512;             // most positions taken at a time
constexpr int64_t kShortChunk = 32768;  // positions in such chunks are kept in 16 bits

// 64 bits from bit `at` on; zeros from `end` on.
inline uint64_t bits_at(const uint8_t* data, const uint8_t* end, int64_t at) {
    const uint8_t* p = data + (at >> 3);
    const int shift = int(at & 7);
    if (end - p >= 9) {
        uint64_t word;
        std::memcpy(&word, p, 8);
        return (word >> shift) | ((uint64_t(p[8]) << 1) << (63 - shift));
    }
    uint64_t word = 0;
    for (int i = 0; i < 9 && p + i < end; ++i) {
        const int to = 8 * i - shift;
        word |= to >= 0 ? uint64_t(p[i]) << to : uint64_t(p[i]) >> -to;
    }
    return word;
}

// Where the next position of a section comes from.
struct Reader {
    const uint8_t *low, *unary, *end;
    int64_t low_bit, unary_bit, unary_limit;  // from the start of their streams; one bits end before the limit
    int low_bits;
    int64_t largest;  // position
};

inline Reader reader_of(const Section& s) {
    return {s.low, s.unary, s.end, 0, 0, 0, s.shape.low_bits, s.shape.chunk - 1};
}

inline void open_group(Reader& r, const Section& s, int64_t group) {
    r.low_bit = group * s.shape.per_group * s.shape.kept * r.low_bits;
    r.unary_bit = s.start(group) * 8;
    r.unary_limit = s.stop(group) * 8;
}

// Behind the limit all bits count as ones, so that bytes nobody checked end, too.
inline uint64_t unary_word(const Reader& r, int64_t bit) {
    return bit < r.unary_limit ? bits_at(r.unary, r.end, bit) : ~uint64_t(0);
}

// Places of the next n one bits, counted from the first unread bit.
inline void take_ones(Reader& r, uint32_t* at, int n) {
    int found = 0;
    for (int64_t bit = r.unary_bit; found < n; bit += 64) {
        uint64_t word = unary_word(r, bit);
        const uint32_t base = uint32_t(bit - r.unary_bit);
        for (; word && found < n; word &= word - 1) at[found++] = base + uint32_t(__builtin_ctzll(word));
    }
    r.unary_bit += int64_t(at[n - 1]) + 1;
}

// Calls with(j, low value) for the next n of them.
template <typename F>
inline void each_low(Reader& r, int n, const F& with) {
    const int width = r.low_bits, per_word = width ? 64 / width : kBatch;
    const uint64_t mask = (uint64_t(1) << width) - 1;
    for (int first = 0; first < n; first += per_word) {
        uint64_t word = width ? bits_at(r.low, r.end, r.low_bit) : 0;
        const int count = n - first < per_word ? n - first : per_word;
        for (int j = 0; j < count; ++j, word >>= width) with(first + j, word & mask);
        r.low_bit += int64_t(count) * width;
    }
}

// The next `runs` times n positions, at most kTaken, each run's not below `base`. Up to 64 behind them are overwritten.
template <typename I>
inline void take_runs(Reader& r, int64_t base, I* out, int runs, int n) {
    uint32_t one[kTaken] = {};
    take_ones(r, one, runs * n);
    int64_t start = 0;
    for (int run = 0; run < runs; ++run, out += n) {
        const uint32_t* at = one + run * n;
        int64_t sum = base;
        each_low(r, n, [&](int j, uint64_t low) {
            sum += int64_t(low);
            const int64_t here = sum + ((int64_t(at[j]) - start - j) << r.low_bits) + j;
            out[j] = I(here < r.largest ? here : r.largest);
        });
        start = int64_t(at[n - 1]) + 1;
    }
}

#ifdef ISA_AVX512

struct LowPlan {
    alignas(64) uint8_t bytes[9][64];   // which bytes go to a lane of eight values
    alignas(64) uint8_t shifts[9][64];  // which bit of its lane each value starts at
};

constexpr LowPlan low_plan() {
    LowPlan plan{};
    for (int b = 0; b <= 8; ++b)
        for (int i = 0; i < 64; ++i) {
            plan.bytes[b][i] = uint8_t(((i / 8) * b + i % 8) & 63);
            plan.shifts[b][i] = uint8_t((i % 8) * b);
        }
    return plan;
}

constexpr LowPlan kLowPlan = low_plan();

// Next 64 low values of at most 8 bits, those behind the n-th are junk.
inline __m512i take_lows(Reader& r, int n) {
    const int b = r.low_bits, shift = int(r.low_bit & 7), bytes = (shift + n * b + 7) / 8;
    const __m512i raw = _mm512_maskz_loadu_epi8(_bzhi_u64(~uint64_t(0), unsigned(bytes)), r.low + (r.low_bit >> 3));
    const __m512i lanes = _mm512_permutexvar_epi8(_mm512_load_si512(kLowPlan.bytes[b]), raw);
    const __m512i from = _mm512_add_epi8(_mm512_load_si512(kLowPlan.shifts[b]), _mm512_set1_epi8(char(shift)));
    r.low_bit += int64_t(n) * b;
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(from, lanes), _mm512_set1_epi8(char((1 << b) - 1)));
}

// Sums of all 16-bit values up to each.
inline __m512i prefix_sums(__m512i x) {
    x = _mm512_add_epi16(x, _mm512_slli_epi64(x, 16));
    x = _mm512_add_epi16(x, _mm512_slli_epi64(x, 32));
    // From the low to the high half of each 128 bits, of each 256 bits, of all.
    const __m512i half = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0706070607060706, -1));
    x = _mm512_add_epi16(x, _mm512_shuffle_epi8(x, half));
    x = _mm512_add_epi16(x, _mm512_maskz_permutexvar_epi16(0xff00ff00u, _mm512_set_epi64(
        0x0017001700170017, 0x0017001700170017, 0, 0, 0x0007000700070007, 0x0007000700070007, 0, 0), x));
    return _mm512_add_epi16(x, _mm512_maskz_permutexvar_epi16(0xffff0000u, _mm512_set1_epi16(15), x));
}

inline __m512i count_from(int first) {
    const __m512i to31 = _mm512_cvtepu8_epi16(_mm256_set_epi64x(0x1f1e1d1c1b1a1918, 0x1716151413121110,
        0x0f0e0d0c0b0a0908, 0x0706050403020100));
    return _mm512_add_epi16(to31, _mm512_set1_epi16(short(first)));
}

// Places of the next n one bits in 16 bits; up to 64 behind them are overwritten.
inline void take_ones16(Reader& r, uint16_t* at, int n) {
    const __m512i places = _mm512_add_epi8(_mm512_load_si512(kLowPlan.shifts[1]), _mm512_set_epi64(
        0x3838383838383838, 0x3030303030303030, 0x2828282828282828, 0x2020202020202020,
        0x1818181818181818, 0x1010101010101010, 0x0808080808080808, 0));
    int found = 0;
    for (int64_t bit = r.unary_bit; found < n; bit += 64) {
        const uint64_t word = unary_word(r, bit);
        const __m512i ones = _mm512_maskz_compress_epi8(word, places);
        const __m512i base = _mm512_set1_epi16(short(bit - r.unary_bit));
        const __m512i first = _mm512_add_epi16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(ones)), base);
        const __m512i second = _mm512_add_epi16(_mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(ones, 1)), base);
        _mm512_storeu_si512(at + found, first);
        _mm512_storeu_si512(at + found + 32, second);
        found += int(_mm_popcnt_u64(word));
    }
    r.unary_bit += int64_t(at[n - 1]) + 1;
}

// One run of up to 32 lanes: positions from places of ones, counts in the run and sums of low values.
inline __m512i positions(__m512i ones, __m512i start, __m512i count, __m512i sums, __m128i width) {
    const __m512i zeros = _mm512_sub_epi16(ones, _mm512_add_epi16(count, start));
    return _mm512_add_epi16(_mm512_sll_epi16(zeros, width), _mm512_add_epi16(count, sums));
}

// As take_runs, for short chunks and narrow low values.
inline void take_short(Reader& r, int64_t base, uint16_t* out, int runs, int n) {
    uint16_t one[kTaken + kBatch];
    take_ones16(r, one, runs * n);
    const __m128i width = _mm_cvtsi32_si128(r.low_bits);
    const __m512i largest = _mm512_set1_epi16(short(r.largest)), last = _mm512_set1_epi16(31);
    int start = 0;
    for (int run = 0; run < runs; ++run, out += n) {
        const uint16_t* at = one + run * n;
        const __m512i from = _mm512_set1_epi16(short(start));
        __m512i sum = _mm512_set1_epi16(short(base));  // of the low values before
        for (int j = 0; j < n; j += kBatch) {
            const __m512i lows = take_lows(r, n - j < kBatch ? n - j : kBatch);
            __m512i sums = prefix_sums(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(lows)));
            sums = _mm512_add_epi16(sums, sum);
            const __m512i low = positions(_mm512_loadu_si512(at + j), from, count_from(j), sums, width);
            _mm512_storeu_si512(out + j, _mm512_min_epu16(low, largest));
            if (n - j <= 32) break;
            sum = _mm512_permutexvar_epi16(last, sums);
            sums = prefix_sums(_mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(lows, 1)));
            sums = _mm512_add_epi16(sums, sum);
            const __m512i high = positions(_mm512_loadu_si512(at + j + 32), from, count_from(j + 32), sums, width);
            _mm512_storeu_si512(out + j + 32, _mm512_min_epu16(high, largest));
            sum = _mm512_permutexvar_epi16(last, sums);
        }
        start = at[n - 1] + 1;
    }
}

template <>
inline void take_runs(Reader& r, int64_t base, uint16_t* out, int runs, int n) {
    if (r.low_bits <= 8) return take_short(r, base, out, runs, n);
    uint32_t wide[kTaken];
    take_runs(r, base, wide, runs, n);
    for (int j = 0; j < runs * n; ++j) out[j] = uint16_t(wide[j]);
}

#endif

// -- whole groups ----------------------------------------------------------------------------------------------------

// A section's positions of one group after another: whole chunks where several fit, else pieces of one.
template <typename I>
struct Taker {
    Reader reader;
    int64_t kept, chunks;  // per chunk; of the group, not begun yet
    int64_t left, next;    // of the chunk in pieces, and what its next position is not below
    int held;
    I index[kTaken + kBatch];

    inline void open(const Section& s, int64_t group) {
        reader = reader_of(s);
        open_group(reader, s, group);
        kept = s.shape.kept;
        chunks = s.shape.in_group(group);
        left = next = 0;
        held = 0;
    }

    inline void fill() {
        if (kept <= kTaken) {
            const int64_t fit = kTaken / kept, runs = fit < chunks ? fit : chunks;
            take_runs(reader, 0, index, int(runs), int(kept));
            chunks -= runs;
            held = int(runs * kept);
            return;
        }
        if (!left) {
            left = kept;
            next = 0;
            --chunks;
        }
        held = int(left < kTaken ? left : kTaken);
        take_runs(reader, next, index, 1, held);
        next = int64_t(index[held - 1]) + 1;
        left -= held;
    }
};

template <typename I>
void unpack_as(const Section& section, int64_t first, int64_t last, I* index) {
    Taker<I> taker;
    for (int64_t group = first; group < last; ++group) {
        taker.open(section, group);
        I* out = index + group * section.shape.per_group * section.shape.kept;
        while (taker.chunks || taker.left) {
            taker.fill();
            std::memcpy(out, taker.index, size_t(taker.held) * sizeof(I));
            out += taker.held;
        }
    }
}

inline void unpack_gaps(const Section& section, int64_t first, int64_t last, bool wide, void* index) {
    if (wide) return unpack_as(section, first, last, static_cast<uint32_t*>(index));
    unpack_as(section, first, last, static_cast<uint16_t*>(index));
}

}  // namespace sparseloco::ISA_NAMESPACE

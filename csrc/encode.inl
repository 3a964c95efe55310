// The fused encoder: error feedback, selection, codes, correction of the residual and gap coding of a chunk while it is
// in cache. Its definition is `Channel.outgoing` with TopK and SignTwoLevel; bits are equal.
// Tried and slower: listing the candidates of a chunk within the error feedback of the next one (two chunks and two
// planes of keys do not fit the first cache), and asking for more of the next chunk than its head.

namespace sparseloco::ISA_NAMESPACE {

// How a block's chunks are walked.
struct Walk {
    int64_t rows, cols, row_stride;  // of a tile
    int64_t padded;                  // C up to a multiple of 64
    int64_t per_maximum, maxima;     // vectors of keys behind one vector of maxima; number of maxima
    bool copy_live, copy_all;        // ragged rows, ragged chunks: work on copies that are filled up with zeros

    Walk(const EncodeJob& job, EncodeScratch& s)
        : rows(job.where.rows), cols(job.where.cols), row_stride(job.where.row_stride),
          padded((job.section.chunk + 63) / 64 * 64) {
        if (cols == row_stride) {  // a tile as wide as its matrix is one run of values
            cols *= rows;
            rows = 1;
        }
        copy_all = job.section.chunk != padded || !job.residual;
        copy_live = copy_all || cols % 32 != 0;
        const int64_t across = copy_live ? padded / 32 : cols / 32, stride = copy_live ? 0 : row_stride;
        for (int64_t i = 0; i < padded / 32; ++i) s.block_offset[i] = i / across * stride + i % across * 32;
        per_maximum = keys_per_maximum(padded, job.section.kept);
        maxima = (padded / 32 + per_maximum - 1) / per_maximum * 32;
    }
};

// Error feedback of one chunk; `WithKeys`: also keys and their maxima for the selection. Rows of the next tile, `ahead`
// of this one, are asked for early: each is a new page, which no prefetcher of a processor finds by itself.
template <bool WithKeys, typename T>
inline void feedback_chunk(const Walk& walk, const EncodeScratch& s, const float* start, const T* live, float* residual,
                           float decay, int64_t ahead) {
    const int64_t blocks = walk.padded / 32;
    uint16_t* maxima = s.maxima;
    for (int64_t first = 0; first < blocks; first += walk.per_maximum, maxima += 32) {
        const int64_t last = first + walk.per_maximum < blocks ? first + walk.per_maximum : blocks;
        Keys most = no_keys();
        for (int64_t i = first; i < last; ++i) {
            const T* later = live + s.block_offset[i] + ahead;
            for (size_t j = 0; j < 32; j += 64 / sizeof(T)) __builtin_prefetch(later + j);
            const Keys keys = feedback32(start + 32 * i, live + s.block_offset[i], residual + 32 * i, decay);
            if (!WithKeys) continue;
            store_keys(s.keys + 32 * i, keys);
            most = larger(most, keys);
        }
        if (WithKeys) store_keys(maxima, most);
    }
}

template <typename T>
inline void copy_rows(T* out, const T* from, const Walk& walk, int64_t chunk) {
    for (int64_t r = 0; r < walk.rows; ++r)
        std::memcpy(out + r * walk.cols, from + r * walk.row_stride, size_t(walk.cols) * sizeof(T));
    std::memset(out + chunk, 0, size_t(walk.padded - chunk) * sizeof(T));
}

inline void copy_padded(float* out, const float* from, int64_t padded, int64_t chunk) {
    if (from) std::memcpy(out, from, size_t(chunk) * 4);
    const int64_t held = from ? chunk : 0;
    std::memset(out + held, 0, size_t(padded - held) * 4);
}

// Error feedback of chunk n. Returns where its residual lies: in place, or in a copy if the chunk is ragged.
template <bool WithKeys, typename T>
inline float* feedback(const EncodeJob& job, const Walk& walk, const EncodeScratch& s, int64_t n, float decay) {
    const int64_t chunk = job.section.chunk;
    const float* start = job.start + n * chunk;
    const T* live = static_cast<const T*>(job.live) + job.where.offset(n);
    float* residual = job.residual ? job.residual + n * chunk : nullptr;
    int64_t ahead = n + 1 < job.section.chunks ? job.where.offset(n + 1) - job.where.offset(n) : 0;
    if (walk.copy_live) {
        ahead = 0;
        T* copy = reinterpret_cast<T*>(s.live);
        copy_rows(copy, live, walk, chunk);
        live = copy;
    }
    if (walk.copy_all) {
        copy_padded(s.start, start, walk.padded, chunk);
        copy_padded(s.residual, residual, walk.padded, chunk);
        start = s.start;
        residual = s.residual;
    }
    feedback_chunk<WithKeys>(walk, s, start, live, residual, decay, ahead);
    return residual;
}

// bfloat16 of the mean kept magnitude: `exact_mean` of compress/base.py.
inline uint16_t chunk_scale(const float* value, int64_t kept) {
    const uint32_t most = largest_magnitude(value, kept);
    if (most >= 0x7f800000u) return to_bf16(float_of(most));  // a residual beyond float32; no shift would make sense
    int length = 0;
    for (int64_t rest = kept - 1; rest; rest >>= 1) ++length;
    int exponent = 0;
    if (most) {
        const double wide = float_of(most);  // normal in float64 also if it is not in float32
        uint64_t u;
        std::memcpy(&u, &wide, 8);
        exponent = int(u >> 52) - 1022;
    }
    const uint64_t power = uint64_t(52 - length - exponent + 1023) << 52;
    double factor;
    std::memcpy(&factor, &power, 8);
    return to_bf16(float(sum_of_floors(value, kept, factor) / (factor * double(kept))));
}

// Codes of the kept values, and what is left of them in the residual. Returns the scale.
inline uint16_t quantize(EncodeScratch& s, float* residual, int64_t kept, const EncodeRule& rule, BitWriter& code) {
    const uint16_t stored = chunk_scale(s.value, kept);
    const float scale = widen(stored);
    const float border = scale * rule.middle, low = rule.low * scale, high = rule.high * scale;
    for (int64_t j = 0; j < kept; j += 16) {
        const int64_t count = kept - j < 16 ? kept - j : 16;
        code.append(code16(s.value + j, border, low, high), int(2 * count));
    }
    for (int64_t j = 0; j < kept; ++j) residual[s.index[j]] = s.value[j];
    return stored;
}

// The first lines of a chunk, so that memory has something to do during the selection; more than these slow it down.
inline void prefetch_head(const EncodeJob& job, int64_t n) {
    const int64_t chunk = job.section.chunk, head = chunk < 512 ? chunk : 512;
    for (int64_t i = 0; i < head; i += 16) {
        __builtin_prefetch(job.start + n * chunk + i);
        __builtin_prefetch(job.residual + n * chunk + i, 1);
    }
}

template <typename T>
void encode_group(const EncodeJob& job, const Walk& walk, const EncodeRule& rule, int64_t number, EncodeScratch& s) {
    const FixedSection& section = job.section;
    const int64_t first = number * section.per_group;
    const int64_t count = section.chunks - first < section.per_group ? section.chunks - first : section.per_group;
    const int64_t slot = section.slot(count), chunk = section.chunk;
    GroupWriter out{{s.low}, {s.code}, {s.unary}};
    for (int64_t n = first; n < first + count; ++n) {
        float* residual = feedback<true, T>(job, walk, s, n, rule.decay);
        if (n + 1 < section.chunks && job.residual) prefetch_head(job, n + 1);
        select_top(s, residual, section, walk.maxima);
        const uint16_t scale = quantize(s, residual, section.kept, rule, out.code);
        std::memcpy(job.out + section.scale_at() + 2 * n, &scale, 2);
        if (walk.copy_all && job.residual) std::memcpy(job.residual + n * chunk, residual, size_t(chunk) * 4);
        append_gaps(out, s.index, section);
    }
    const uint8_t* end = out.unary.next + (out.unary.fill ? 1 : 0);
    std::memset(s.unary + (end - s.unary), 0, size_t(slot - (end - s.unary)));
    std::memcpy(job.out + section.low_bytes_of(first), s.low, size_t(section.low_bytes_of(count)));
    std::memcpy(job.out + section.unary_at() + number * section.slot(section.per_group), s.unary, size_t(slot));
    std::memcpy(job.out + section.code_at() + section.code_bytes_of(first), s.code, size_t(section.code_bytes_of(count)));
}

template <typename T>
void encode_groups(const EncodeJob& job, const EncodeRule& rule, int64_t first, int64_t last, EncodeScratch& s) {
    const Walk walk(job, s);
    for (int64_t group = first; group < last; ++group) encode_group<T>(job, walk, rule, group, s);
}

void encode(const EncodeJob& job, const EncodeRule& rule, int64_t first, int64_t last, EncodeScratch& s) {
    if (job.bf16)
        encode_groups<uint16_t>(job, rule, first, last, s);
    else
        encode_groups<float>(job, rule, first, last, s);
}

template <typename T>
void ef_chunks(const EncodeJob& job, float decay, int64_t first, int64_t last, EncodeScratch& s) {
    const Walk walk(job, s);
    for (int64_t n = first; n < last; ++n) {
        float* residual = feedback<false, T>(job, walk, s, n, decay);
        if (walk.copy_all && job.residual)
            std::memcpy(job.residual + n * job.section.chunk, residual, size_t(job.section.chunk) * 4);
    }
}

void ef_pass(const EncodeJob& job, float decay, int64_t first, int64_t last, EncodeScratch& s) {
    if (job.bf16)
        ef_chunks<uint16_t>(job, decay, first, last, s);
    else
        ef_chunks<float>(job, decay, first, last, s);
}

}  // namespace sparseloco::ISA_NAMESPACE

// Summing a window of a chunk up: where the peers' values go, and where they come from.

namespace sparseloco::ISA_NAMESPACE {

constexpr int64_t kWindow = 4096;       // values summed at a time
constexpr int64_t kSparse = 2;          // one value for so many coordinates, or fewer: few coordinates have several
constexpr int64_t kMostMarked = 16000;  // peers whose codes 16 bits can number

template <typename T>
struct Owned {
    T* items;
    explicit Owned(int64_t count) : items(new T[size_t(count)]) {}
    ~Owned() { delete[] items; }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
};

// What each code of each peer stands for in the present chunk.
struct Values {
    Pair* sum;      // [peers][4] weight times value, and weight
    float* single;  // [peers][4] the mean if no other peer sends that coordinate

    inline void start(const SettlePlan& plan, int64_t peer, uint16_t scale_bits) {
        const float scale = widen(scale_bits), levels[4] = {plan.low, -plan.low, plan.high, -plan.high};
        const double weight = double(plan.weights[peer]), divisor = double(plan.total_weight);
        for (int c = 0; c < 4; ++c) {
            const float value = levels[c] * scale;  // rounded to float32, as the definition decodes it
            const double total = weight * double(value);
            sum[4 * peer + c] = {total, weight};
            // A sum starts at zero, which makes minus zero zero. Divided by the one weight in it, it is the value.
            single[4 * peer + c] = plan.over == Mean::PEERS ? float((0.0 + total) / divisor) : 0.0f + value;
        }
    }
};

inline void add(double& sum, const Pair& value) { sum += value.total; }
inline void add(Pair& sum, const Pair& value) {
    sum.total += value.total;
    sum.weight += value.weight;
}

// Where values of a window go when most coordinates have several: a sum for each coordinate.
template <typename A>
struct DenseSums {
    using Sum = A;
    alignas(64) A sums[kWindow];
    Values values;

    inline void reset(int64_t) {}
    template <typename I>
    inline void add_values(const I* index, int64_t n, int64_t first, int64_t peer, uint64_t codes) {
        const Pair* value = values.sum + 4 * peer;
        A* out = sums - first;
        for (int64_t j = 0; j < n; ++j, codes >>= 2) add(out[index[j]], value[codes & 3]);
    }
    inline void finish(const SettlePlan&, int64_t) {}
};

// Where they go when most coordinates have one or none: the last value of each, and a list of those that were there
// before. A quarter of the memory, and no division for coordinates of one peer.
struct SparseMeans {
    using Sum = float;
    alignas(64) float sums[kWindow];  // means
    alignas(64) uint16_t last[kWindow];  // 1 + 4 * peer + code of the last value; 0 for none
    Pair again[kWindow];  // sums of coordinates with several values; zero between windows
    uint64_t* list;  // position in the chunk, and above 32 bits what was there before
    int64_t listed;
    Values values;

    inline void reset(int64_t width) {
        std::memset(last, 0, size_t(width) * sizeof *last);
        listed = 0;
    }
    template <typename I>
    inline void add_values(const I* index, int64_t n, int64_t first, int64_t peer, uint64_t codes) {
        const float* single = values.single + 4 * peer;
        float* mean = sums - first;
        uint16_t* mark = last - first;
        const uint32_t what = uint32_t(4 * peer + 1);
        uint64_t* end = list + listed;
#pragma GCC unroll 8
        for (int64_t j = 0; j < n; ++j, codes >>= 2) {
            const uint64_t at = index[j], code = codes & 3, before = mark[at];
            mean[at] = single[code];
            mark[at] = uint16_t(what + uint32_t(code));
            *end = at | before << 32;
            end += before != 0;
        }
        listed = end - list;
    }
    // Adds up coordinates with several values in peer order: those of the list, then the last.
    inline void finish(const SettlePlan& plan, int64_t first) {
        Pair* sum = again - first;
        for (int64_t i = 0; i < listed; ++i) add(sum[uint32_t(list[i])], values.sum[(list[i] >> 32) - 1]);
        for (int64_t i = 0; i < listed; ++i) {
            const int64_t at = uint32_t(list[i]);
            if (sum[at].weight == 0) continue;  // done: it is in the list more than once
            add(sum[at], values.sum[last[at - first] - 1]);
            const double weight = plan.over == Mean::PEERS ? double(plan.total_weight) : sum[at].weight;
            sums[at - first] = float(sum[at].total / weight);
            sum[at] = {0, 0};
        }
    }
};

// One peer's positions and codes, chunk after chunk.
template <typename I>
struct Cursor {
    Taker<I> taker;
    const Section* section;
    int64_t code_bit;
    int64_t left;  // positions of the present chunk not added yet
    int used;      // of those that the taker holds

    inline void open(const Section& s, int64_t group) {
        section = &s;
        taker.open(s, group);
        code_bit = group * s.shape.per_group * s.shape.kept * 2;
        used = 0;
    }

    inline void start(int64_t chunk, const SettlePlan& plan, int64_t peer, Values& values) {
        uint16_t scale;
        std::memcpy(&scale, section->scale + 2 * chunk, 2);
        values.start(plan, peer, scale);
        left = section->shape.kept;
    }

    inline void make_ready() {
        if (used == taker.held && left) fill();
    }

    __attribute__((noinline)) void fill() {
        const int64_t low = taker.reader.low_bit, unary = taker.reader.unary_bit, code = code_bit;
        taker.fill();
        used = 0;
        // Three streams of each of many peers are more than the processor follows by itself.
        fetch(taker.reader.low, low, taker.reader.low_bit);
        fetch(taker.reader.unary, unary, taker.reader.unary_bit);
        fetch(section->code, code, code + 2 * taker.held);
    }

    // What the next fill will read, if it reads as many bits as this one.
    static inline void fetch(const uint8_t* stream, int64_t from, int64_t to) {
        for (int64_t bit = to; bit < 2 * to - from + 512; bit += 512) __builtin_prefetch(stream + (bit >> 3));
    }

    // Adds the values at positions below `last`; `first` is where the window starts.
    template <typename S>
    inline void add_until(S& sink, int64_t peer, int64_t first, int64_t last) {
        while (left) {
            make_ready();
            const int end = taker.held - used < left ? taker.held : used + int(left);
            int stop = end;
            while (stop > used && taker.index[stop - 1] >= last) --stop;
            left -= stop - used;
            add_run(sink, peer, first, stop);
            if (stop < end) return;
        }
    }

    // Not inlined: among all that settle_groups holds, the loop's few numbers would not stay in registers.
    template <typename S>
    __attribute__((noinline)) void add_run(S& sink, int64_t peer, int64_t first, int stop) {
        const uint8_t *codes = section->code, *end = section->end;
        for (; used + 32 <= stop; used += 32, code_bit += 64)
            sink.add_values(taker.index + used, 32, first, peer, bits_at(codes, end, code_bit));
        const int rest = stop - used;
        if (!rest) return;
        sink.add_values(taker.index + used, rest, first, peer, bits_at(codes, end, code_bit));
        used += rest;
        code_bit += 2 * rest;
    }
};

}  // namespace sparseloco::ISA_NAMESPACE

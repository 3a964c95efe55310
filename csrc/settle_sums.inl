// Summing a window of a chunk up: where the peers' values go, and where they come from.

namespace sparseloco::ISA_NAMESPACE {

constexpr int64_t kWindow = 4096;  // values summed at a time

template <typename T>
struct Owned {
    T* items;
    explicit Owned(int64_t count) : items(new T[size_t(count)]) {}
    ~Owned() { delete[] items; }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
};

inline void add(double& sum, const Pair& value) { sum += value.total; }
inline void add(Pair& sum, const Pair& value) {
    sum.total += value.total;
    sum.weight += value.weight;
}

// A sum for each coordinate of a window; all are zero between windows.
template <typename A>
struct Sums {
    using Value = Pair;
    alignas(64) A of[kWindow];

    // What a peer adds where it sends a value.
    static inline Pair value_of(float value, int64_t weight, int64_t) {
        return {double(weight) * double(value), double(weight)};
    }
    inline void make_room(const int64_t*) {}
    inline void finish(const int64_t*) {}

    template <typename I>
    inline void add_values(const I* index, int64_t n, int64_t first, const Pair* values, uint64_t codes) {
        A* out = of - first;
        for (int64_t j = 0; j < n; ++j, codes >>= 2) add(out[index[j]], values[codes & 3]);
    }
};

// One peer's positions and codes, chunk after chunk, for windows of one type.
template <typename I, typename W>
struct Cursor {
    Taker<I> taker;
    const Section* section;
    int64_t code_bit;
    int64_t left;  // positions of the present chunk not added yet
    int used;      // of those that the taker holds
    typename W::Value values[4];  // of the codes in the present chunk

    inline void open(const Section& s, int64_t group) {
        section = &s;
        taker.open(s, group);
        code_bit = group * s.shape.per_group * s.shape.kept * 2;
        used = 0;
    }

    inline void start(int64_t chunk, const SettlePlan& plan, int64_t peer) {
        uint16_t bits;
        std::memcpy(&bits, section->scale + 2 * chunk, 2);
        const float scale = widen(bits), levels[4] = {plan.low, -plan.low, plan.high, -plan.high};
        // Products are rounded to float32, as the definition decodes them.
        for (int c = 0; c < 4; ++c) values[c] = W::value_of(levels[c] * scale, plan.weights[peer], peer);
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
    inline void add_until(W& sums, const int64_t* weights, int64_t first, int64_t last) {
        while (left) {
            make_ready();
            const int end = taker.held - used < left ? taker.held : used + int(left);
            int stop = end;
            while (stop > used && taker.index[stop - 1] >= last) --stop;
            left -= stop - used;
            sums.make_room(weights);
            add_run(sums, first, stop);
            if (stop < end) return;
        }
    }

    // Not inlined: among all that settle_groups holds, the loop's few numbers would not stay in registers.
    __attribute__((noinline)) void add_run(W& sums, int64_t first, int stop) {
        const uint8_t *codes = section->code, *end = section->end;
        for (; used + 32 <= stop; used += 32, code_bit += 64)
            sums.add_values(taker.index + used, 32, first, values, bits_at(codes, end, code_bit));
        const int rest = stop - used;
        if (!rest) return;
        sums.add_values(taker.index + used, rest, first, values, bits_at(codes, end, code_bit));
        used += rest;
        code_bit += 2 * rest;
    }
};

}  // namespace sparseloco::ISA_NAMESPACE

// One pass from the peers' sections to the live parameter. A window of a chunk is summed up in the first cache, peer
// by peer; then, row by row, the mean is taken, the anchor moved and the live values written.

namespace sparseloco::ISA_NAMESPACE {

constexpr int64_t kWindow = 4096;  // values summed at a time
constexpr int64_t kSparse = 2;     // one value for so many coordinates, or fewer: few coordinates have several
constexpr int64_t kMostMarked = 16000;  // peers; their codes are numbered in 16 bits

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
            // A sum starts at zero, and adding that makes minus zero zero. With one weight, the division gives the value.
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

// The plan's numbers in lanes, and the running sum of squares.
struct Step {
    D8 lr, momentum, decay, divisor, alpha, beta, square;
    bool nesterov, power;
};

inline Step step_of(const SettlePlan& plan) {
    Step s{};
    s.lr = all(plan.lr);
    s.momentum = all(plan.momentum);
    s.decay = all(plan.decay);
    s.divisor = all(double(plan.total_weight));
    s.alpha = all(plan.alpha);
    s.beta = all(1 - plan.alpha);
    s.square = all(0);
    s.nesterov = plan.nesterov;
    s.power = powers_of_two(s.divisor);
    return s;
}

// Means of eight sums. Division by a power of two is exact, and so is multiplication by its inverse; nearly all
// weights are one peer's alone, so for most weights a division is rare.
inline F8 mean(const float* means, const Step&) { return load(means); }
inline F8 mean(const double* sums, const Step& s) {
    const D8 total = load(sums);
    return narrow(s.power ? total * inverse_power(s.divisor) : total / s.divisor);
}
inline F8 mean(const Pair* sums, const Step&) {
    D8 total, weight;
    load(sums, total, weight);
    weight = max(weight, all(1));
    return narrow(powers_of_two(weight) ? total * inverse_power(weight) : total / weight);
}

inline void clear(float* means) { store(means, F8{}); }
inline void clear(double* sums) { store(sums, all(0)); }
inline void clear(Pair* sums) {
    store(&sums[0].total, all(0));
    store(&sums[4].total, all(0));
}

// The outer step on eight values; all products are exact in float64 (outer.Sgd).
template <bool GENERAL, typename A>
inline bool step8(A* sums, float* anchor, float* velocity, const Step& s, D8& square) {
    const D8 update = wide(mean(sums, s));
    clear(sums);
    square = square + update * update;
    D8 direction = update, moved = wide(load(anchor));
    F8 speed{};
    if (GENERAL) {
        if (velocity) {
            speed = narrow(wide(load(velocity)) * s.momentum + update);
            direction = wide(speed);
            if (s.nesterov) direction = wide(narrow(direction * s.momentum + update));
        }
        moved = wide(narrow(moved * s.decay));
    }
    const F8 result = narrow(moved - direction * s.lr);
    if (!sane(result)) return false;
    if (GENERAL && velocity) store(velocity, speed);
    store(anchor, result);
    return true;
}

// The rest of a row, fewer than eight values.
template <bool GENERAL, typename A>
inline bool step_rest(A* sums, float* anchor, float* velocity, size_t n, const Step& s, D8& square) {
    A some[8] = {};
    float x[8] = {}, v[8] = {};
    std::memcpy(static_cast<void*>(some), sums, n * sizeof(A));
    std::memcpy(x, anchor, n * sizeof(float));
    if (GENERAL && velocity) std::memcpy(v, velocity, n * sizeof(float));
    if (!step8<GENERAL>(some, x, GENERAL && velocity ? v : nullptr, s, square)) return false;
    std::memcpy(static_cast<void*>(sums), some, n * sizeof(A));  // cleared
    std::memcpy(anchor, x, n * sizeof(float));
    if (GENERAL && velocity) std::memcpy(velocity, v, n * sizeof(float));
    return true;
}

// Not inlined, so that the running sum of squares stays in a register.
template <bool GENERAL, typename A>
__attribute__((noinline)) bool step_row(A* sums, float* anchor, float* velocity, int64_t n, Step& s) {
    D8 square = s.square;  // in a register
    int64_t c = 0;
    for (; c + 8 <= n; c += 8)
        if (!step8<GENERAL>(sums + c, anchor + c, GENERAL && velocity ? velocity + c : nullptr, s, square))
            return false;
    if (c < n && !step_rest<GENERAL>(sums + c, anchor + c, GENERAL && velocity ? velocity + c : nullptr,
                                     size_t(n - c), s, square))
        return false;
    s.square = square;
    return true;
}

// merge.py, on eight values.
template <typename T>
inline F8 merged(Merge merge, const float* anchor, const T* live, const T* snapshot, const Step& s) {
    if (merge == Merge::REPLACE) return load(anchor);
    const D8 agreed = wide(load(anchor)), own = wide(load(live));
    if (merge == Merge::BLEND) return narrow(agreed * s.beta + own * s.alpha);
    return narrow((own - wide(load(snapshot))) + agreed);
}

template <typename T>
inline void merge_row(Merge merge, const float* anchor, T* live, const T* snapshot, int64_t n, bool lines,
                      const Step& s) {
    int64_t c = 0;
    if (lines)
        for (; c + 16 <= n; c += 16) stream16(live + c, anchor + c);
    else
        for (; c + 8 <= n; c += 8)
            store(live + c, merged(merge, anchor + c, live + c, snapshot ? snapshot + c : nullptr, s));
    if (c == n) return;
    const size_t rest = size_t(n - c);
    float x[8] = {};
    T own[8] = {}, then[8] = {};
    std::memcpy(x, anchor + c, rest * sizeof(float));
    std::memcpy(own, live + c, rest * sizeof(T));
    if (snapshot) std::memcpy(then, snapshot + c, rest * sizeof(T));
    store(own, merged(merge, x, own, then, s));
    std::memcpy(live + c, own, rest * sizeof(T));
}

// Calls with(offset in the chunk, offset in the live tensor, length) for every run of neighbours in a window of a chunk.
// Tiles as wide as the matrix are one run.
template <typename F>
inline bool each_run(const Geometry& where, int64_t chunk, int64_t first, int64_t last, const F& with) {
    const int64_t corner = where.offset(chunk);
    const int64_t run = where.cols == where.row_stride ? where.rows * where.cols : where.cols;
    for (int64_t at = first; at < last;) {
        const int64_t row = at / run, col = at % run;
        const int64_t n = run - col < last - at ? run - col : last - at;
        if (!with(at, corner + row * where.row_stride + col, n)) return false;
        at += n;
    }
    return true;
}

// Whether all runs are whole lines of the cache, 16 values or a multiple, so that stores past it pay.
inline bool whole_lines(const SettleJob& job, size_t item) {
    const auto fits = [&](int64_t values) { return size_t(values) * item % 64 == 0; };
    return reinterpret_cast<uintptr_t>(job.live) % 64 == 0 && fits(job.where.row_stride) && fits(job.where.cols) &&
           fits(job.where.col_offset);
}

// What writing a window needs; the anchor's and velocity's pointers are those of the chunk.
template <typename T>
struct Target {
    const SettlePlan& plan;
    const SettleJob& job;
    T* live;
    const T* snapshot;
    bool lines;

    Target(const SettlePlan& p, const SettleJob& j)
        : plan(p), job(j), live(static_cast<T*>(j.live)), snapshot(static_cast<const T*>(j.snapshot)),
          lines(p.merge == Merge::REPLACE && whole_lines(j, sizeof(T))) {}

    void merge(const float* anchor, int64_t to, int64_t n, const Step& s) const {
        merge_row(plan.merge, anchor, live + to, snapshot ? snapshot + to : nullptr, n, lines, s);
    }
};

template <bool GENERAL, typename A, typename T>
inline bool write_window(const Target<T>& target, int64_t chunk, int64_t first, int64_t last, A* sums, Step& s) {
    const SettleJob& job = target.job;
    float* anchor = job.anchor + chunk * job.shape.chunk;
    float* velocity = GENERAL && job.velocity ? job.velocity + chunk * job.shape.chunk : nullptr;
    return each_run(job.where, chunk, first, last, [&](int64_t at, int64_t to, int64_t n) {
        if (!step_row<GENERAL>(sums + (at - first), anchor + at, velocity ? velocity + at : nullptr, n, s))
            return false;
        target.merge(anchor + at, to, n, s);
        return true;
    });
}

// While peer p's values are added, its share of the window of the anchor comes from memory.
inline void fetch_share(const float* anchor, int64_t count, int64_t p, int64_t peers) {
    constexpr int64_t kLine = 16;
    for (int64_t at = count * p / peers; at < count * (p + 1) / peers; at += kLine) __builtin_prefetch(anchor + at, 1);
}

template <typename I, typename S, typename T>
bool settle_groups(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, S& sink, double* square) {
    const Target<T> target(plan, job);
    const int64_t size = job.shape.chunk;
    Owned<Cursor<I>> cursors(plan.peers);
    Step s = step_of(plan);
    for (int64_t group = first; group < last; ++group) {
        for (int64_t p = 0; p < plan.peers; ++p) cursors.items[p].open(job.sections[p], group);
        const int64_t begin = group * job.shape.per_group;
        for (int64_t chunk = begin; chunk < begin + job.shape.in_group(group); ++chunk) {
            for (int64_t p = 0; p < plan.peers; ++p) cursors.items[p].start(chunk, plan, p, sink.values);
            for (int64_t at = 0; at < size; at += kWindow) {
                const int64_t stop = at + kWindow < size ? at + kWindow : size;
                sink.reset(stop - at);
                cursors.items[0].make_ready();
                for (int64_t p = 0; p < plan.peers; ++p) {
                    // Decoding is a long chain of few instructions, so the next peer's runs beside this one's additions.
                    if (p + 1 < plan.peers) cursors.items[p + 1].make_ready();
                    fetch_share(job.anchor + chunk * size + at, stop - at, p, plan.peers);
                    cursors.items[p].add_until(sink, p, at, stop);
                }
                sink.finish(plan, at);
                if (!(plan.general ? write_window<true>(target, chunk, at, stop, sink.sums, s)
                                   : write_window<false>(target, chunk, at, stop, sink.sums, s)))
                    return false;
            }
        }
    }
    fence();
    *square = sum(s.square);
    return true;
}

// With no peers the anchor stays as it is, or, to measure, is written as it is.
template <typename T>
void merge_groups(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, bool rewrite) {
    const Target<T> target(plan, job);
    const Step s = step_of(plan);
    const int64_t stop = last == job.shape.groups() ? job.shape.chunks : last * job.shape.per_group;
    for (int64_t chunk = first * job.shape.per_group; chunk < stop; ++chunk) {
        float* anchor = job.anchor + chunk * job.shape.chunk;
        each_run(job.where, chunk, 0, job.shape.chunk, [&](int64_t at, int64_t to, int64_t n) {
            if (rewrite)
                for (int64_t c = at; c + 8 <= at + n; c += 8) store(anchor + c, narrow(wide(load(anchor + c))));
            target.merge(anchor + at, to, n, s);
            return true;
        });
    }
    fence();
}

template <typename S>
bool settle_into(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, S& sink, double* square) {
    Owned<Pair> sums(4 * plan.peers);
    Owned<float> singles(4 * plan.peers);
    sink.values = {sums.items, singles.items};
    const bool is_short = job.shape.chunk <= kShortChunk;
    if (job.bf16)
        return is_short ? settle_groups<uint16_t, S, uint16_t>(plan, job, first, last, sink, square)
                        : settle_groups<uint32_t, S, uint16_t>(plan, job, first, last, sink, square);
    return is_short ? settle_groups<uint16_t, S, float>(plan, job, first, last, sink, square)
                    : settle_groups<uint32_t, S, float>(plan, job, first, last, sink, square);
}

template <typename A>
bool settle_dense(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    Owned<DenseSums<A>> sink(1);
    std::memset(static_cast<void*>(sink.items->sums), 0, sizeof sink.items->sums);
    return settle_into(plan, job, first, last, *sink.items, square);
}

inline bool settle_sparse(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    Owned<SparseMeans> sink(1);
    std::memset(static_cast<void*>(sink.items), 0, sizeof *sink.items);
    const int64_t kept = job.shape.kept < kWindow ? job.shape.kept : kWindow;
    Owned<uint64_t> list(plan.peers * kept + 1);
    sink.items->list = list.items;
    return settle_into(plan, job, first, last, *sink.items, square);
}

inline bool settle(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    if (!plan.peers) {
        if (job.bf16) merge_groups<uint16_t>(plan, job, first, last, false);
        else merge_groups<float>(plan, job, first, last, false);
        *square = 0;
        return true;
    }
    if (plan.peers <= kMostMarked && plan.peers * job.shape.kept <= job.shape.chunk / kSparse)
        return settle_sparse(plan, job, first, last, square);
    return plan.over == Mean::PEERS ? settle_dense<double>(plan, job, first, last, square)
                                    : settle_dense<Pair>(plan, job, first, last, square);
}

inline void apply(const SettleJob& job, int64_t first, int64_t last) {
    SettlePlan plan{};
    plan.merge = Merge::REPLACE;
    plan.total_weight = 1;
    if (job.bf16) merge_groups<uint16_t>(plan, job, first, last, true);
    else merge_groups<float>(plan, job, first, last, true);
}

}  // namespace sparseloco::ISA_NAMESPACE

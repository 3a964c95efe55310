// One pass from the peers' sections to the live parameter. A window of a chunk is summed up in the first cache, peer
// by peer; then, row by row, the mean is taken, the anchor moved and the live values written.

namespace sparseloco::ISA_NAMESPACE {

constexpr int64_t kWindow = 4096;  // values summed at a time: 64 KiB of pairs
constexpr int kHeld = 4 * kBatch;  // positions of one peer decoded ahead

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

// One peer's values of the present chunk, in ascending order.
template <typename I>
struct Cursor {
    Reader reader;
    const Section* section;
    int64_t code_bit;
    int64_t left, next;  // positions of the chunk not decoded yet, and what they cannot be below
    int used, held;
    alignas(16) Pair values[4];  // of the codes: weight times value, and weight
    I index[kHeld];

    void open(const Section& s, int64_t group) {
        section = &s;
        reader = reader_of(s);
        open_group(reader, s, group);
        code_bit = group * s.shape.per_group * s.shape.kept * 2;
    }

    void start(int64_t chunk, const SettlePlan& plan, int64_t weight) {
        uint16_t bits;
        std::memcpy(&bits, section->scale + 2 * chunk, 2);
        const float scale = widen(bits), levels[4] = {plan.low, -plan.low, plan.high, -plan.high};
        for (int c = 0; c < 4; ++c) {
            const float value = levels[c] * scale;  // rounded to float32, as the definition decodes it
            values[c] = {double(weight) * double(value), double(weight)};
        }
        left = section->shape.kept;
        next = 0;
        used = held = 0;
    }

    void fill() {
        used = held = 0;
        while (left && held < kHeld) {
            const int n = int(left < kBatch ? left : kBatch);
            next = take(reader, next, index + held, n);
            held += n;
            left -= n;
        }
    }

    // Adds the values at positions from `first` up to `last`; sums[0] is that of `first`.
    template <typename A>
    void add_until(A* sums, int64_t first, int64_t last) {
        for (;;) {
            if (used == held) {
                if (!left) return;
                fill();
            }
            int stop = held;
            while (index[stop - 1] >= last && stop > used) --stop;
            add_run(sums, first, stop);
            if (used < held) return;
        }
    }

    template <typename A>
    void add_run(A* sums, int64_t first, int stop) {
        while (used < stop) {
            uint64_t codes = bits_at(section->code, section->end, code_bit);
            const int n = stop - used < 32 ? stop - used : 32;
            const I* at = index + used;
            for (int j = 0; j < n; ++j, codes >>= 2) add(sums[int64_t(at[j]) - first], values[codes & 3]);
            used += n;
            code_bit += 2 * n;
        }
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

inline void clear(double* sums) { store(sums, all(0)); }
inline void clear(Pair* sums) {
    store(&sums[0].total, all(0));
    store(&sums[4].total, all(0));
}

// The outer step on eight values; all products are exact in float64 (outer.Sgd).
template <bool GENERAL, typename A>
inline bool step8(A* sums, float* anchor, float* velocity, Step& s) {
    const D8 update = wide(mean(sums, s));
    clear(sums);
    s.square = s.square + update * update;
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

template <bool GENERAL, typename A>
inline bool step_row(A* sums, float* anchor, float* velocity, int64_t n, Step& s) {
    int64_t c = 0;
    for (; c + 8 <= n; c += 8)
        if (!step8<GENERAL>(sums + c, anchor + c, GENERAL && velocity ? velocity + c : nullptr, s)) return false;
    if (c == n) return true;
    const size_t rest = size_t(n - c);
    A some[8] = {};
    float x[8] = {}, v[8] = {};
    std::memcpy(static_cast<void*>(some), sums + c, rest * sizeof(A));
    std::memcpy(x, anchor + c, rest * sizeof(float));
    if (GENERAL && velocity) std::memcpy(v, velocity + c, rest * sizeof(float));
    if (!step8<GENERAL>(some, x, GENERAL && velocity ? v : nullptr, s)) return false;
    std::memcpy(static_cast<void*>(sums + c), some, rest * sizeof(A));  // cleared
    std::memcpy(anchor + c, x, rest * sizeof(float));
    if (GENERAL && velocity) std::memcpy(velocity + c, v, rest * sizeof(float));
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
        for (; c + 8 <= n; c += 8) stream(live + c, load(anchor + c));
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

// Whether all runs are whole lines of the cache, so that stores past it pay.
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

template <typename A>
struct alignas(64) Sums {
    A values[kWindow];
};

template <typename I, typename A, typename T>
bool settle_groups(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    const Target<T> target(plan, job);
    const int64_t size = job.shape.chunk;
    Owned<Cursor<I>> cursors(plan.peers);
    Owned<Sums<A>> window(1);
    A* sums = window.items->values;
    std::memset(static_cast<void*>(sums), 0, sizeof *window.items);
    Step s = step_of(plan);
    for (int64_t group = first; group < last; ++group) {
        for (int64_t p = 0; p < plan.peers; ++p) cursors.items[p].open(job.sections[p], group);
        const int64_t begin = group * job.shape.per_group;
        for (int64_t chunk = begin; chunk < begin + job.shape.in_group(group); ++chunk) {
            for (int64_t p = 0; p < plan.peers; ++p) cursors.items[p].start(chunk, plan, plan.weights[p]);
            for (int64_t at = 0; at < size; at += kWindow) {
                const int64_t stop = at + kWindow < size ? at + kWindow : size;
                for (int64_t p = 0; p < plan.peers; ++p) cursors.items[p].add_until(sums, at, stop);
                if (!(plan.general ? write_window<true>(target, chunk, at, stop, sums, s)
                                   : write_window<false>(target, chunk, at, stop, sums, s)))
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

template <typename I, typename A>
bool settle_into(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    return job.bf16 ? settle_groups<I, A, uint16_t>(plan, job, first, last, square)
                    : settle_groups<I, A, float>(plan, job, first, last, square);
}

template <typename I>
bool settle_mean(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    return plan.over == Mean::PEERS ? settle_into<I, double>(plan, job, first, last, square)
                                    : settle_into<I, Pair>(plan, job, first, last, square);
}

inline bool settle(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    if (plan.peers)
        return job.shape.chunk <= kShortChunk ? settle_mean<uint16_t>(plan, job, first, last, square)
                                              : settle_mean<uint32_t>(plan, job, first, last, square);
    if (job.bf16) merge_groups<uint16_t>(plan, job, first, last, false);
    else merge_groups<float>(plan, job, first, last, false);
    *square = 0;
    return true;
}

inline void apply(const SettleJob& job, int64_t first, int64_t last) {
    SettlePlan plan{};
    plan.merge = Merge::REPLACE;
    plan.total_weight = 1;
    if (job.bf16) merge_groups<uint16_t>(plan, job, first, last, true);
    else merge_groups<float>(plan, job, first, last, true);
}

}  // namespace sparseloco::ISA_NAMESPACE

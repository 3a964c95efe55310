// One pass from the peers' sections to the live parameter. A window of a chunk is summed up in the first cache, peer
// by peer; then, row by row, the mean is taken, the anchor moved and the live values written.

namespace sparseloco::ISA_NAMESPACE {

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

// Calls with(offset in the chunk, offset in the live tensor, length) for every run of neighbours in a window of a
// chunk. Tiles as wide as the matrix are one run.
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

template <typename I, typename A, typename T>
bool settle_groups(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    const Target<T> target(plan, job);
    const int64_t size = job.shape.chunk;
    Owned<Cursor<I>> cursors(plan.peers);
    Owned<Sums<A>> window(1);
    Sums<A>& sums = *window.items;
    std::memset(static_cast<void*>(sums.of), 0, sizeof sums.of);
    Step s = step_of(plan);
    for (int64_t group = first; group < last; ++group) {
        for (int64_t p = 0; p < plan.peers; ++p) cursors.items[p].open(job.sections[p], group);
        const int64_t begin = group * job.shape.per_group;
        for (int64_t chunk = begin; chunk < begin + job.shape.in_group(group); ++chunk) {
            for (int64_t p = 0; p < plan.peers; ++p) cursors.items[p].start(chunk, plan, plan.weights[p]);
            for (int64_t at = 0; at < size; at += kWindow) {
                const int64_t stop = at + kWindow < size ? at + kWindow : size;
                cursors.items[0].make_ready();
                for (int64_t p = 0; p < plan.peers; ++p) {
                    // Decoding is a long chain of few instructions: the next peer's runs beside this one's additions.
                    if (p + 1 < plan.peers) cursors.items[p + 1].make_ready();
                    fetch_share(job.anchor + chunk * size + at, stop - at, p, plan.peers);
                    cursors.items[p].add_until(sums, at, stop);
                }
                if (!(plan.general ? write_window<true>(target, chunk, at, stop, sums.of, s)
                                   : write_window<false>(target, chunk, at, stop, sums.of, s)))
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

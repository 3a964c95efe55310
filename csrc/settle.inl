// One pass from the peers' sections to the live parameter. A window of a chunk is summed up in the first cache, peer
// by peer; then, row by row, the mean is taken, the anchor moved and the live values written.

namespace sparseloco::ISA_NAMESPACE {

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
        for (; c + 16 <= n; c += 16) stream16(live + c, load16(anchor + c));
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
    int64_t row = first / run, col = first % run;
    for (int64_t at = first; at < last; ++row, col = 0) {
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
inline bool step_window(const Target<T>& target, int64_t chunk, int64_t first, int64_t last, A* sums, Step& s) {
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

template <typename A, typename T>
inline bool write_window(const Target<T>& target, int64_t chunk, int64_t first, int64_t last, Sums<A>& sums, Step& s) {
    return target.plan.general ? step_window<true>(target, chunk, first, last, sums.of, s)
                               : step_window<false>(target, chunk, first, last, sums.of, s);
}

template <typename T>
inline bool write_window(const Target<T>& target, int64_t chunk, int64_t first, int64_t last, Slots& slots, Step& s) {
    float* anchor = target.job.anchor + chunk * target.job.shape.chunk;
    return each_run(target.job.where, chunk, first, last, [&](int64_t at, int64_t to, int64_t n) {
        T* stream = target.lines ? target.live + to : nullptr;
        Slot* from = slots.of + (at - first);
        if (!(target.plan.lr == 1 ? move_row<true>(from, anchor + at, stream, n, s)
                                  : move_row<false>(from, anchor + at, stream, n, s)))
            return false;
        if (!stream) target.merge(anchor + at, to, n, s);
        return true;
    });
}

// While peer p's values are added, its share of the window of the anchor comes from memory.
inline void fetch_share(const float* anchor, int64_t count, int64_t p, int64_t peers) {
    constexpr int64_t kLine = 16;
    for (int64_t at = count * p / peers; at < count * (p + 1) / peers; at += kLine) __builtin_prefetch(anchor + at, 1);
}

template <typename I, typename W, typename T>
bool settle_groups(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    const Target<T> target(plan, job);
    const int64_t size = job.shape.chunk;
    Owned<Cursor<I, W>> cursors(plan.peers);
    Owned<W> window(1);
    W& sums = *window.items;
    std::memset(static_cast<void*>(&sums), 0, sizeof sums);
    Step s = step_of(plan);
    for (int64_t group = first; group < last; ++group) {
        for (int64_t p = 0; p < plan.peers; ++p) cursors.items[p].open(job.sections[p], group);
        const int64_t begin = group * job.shape.per_group;
        for (int64_t chunk = begin; chunk < begin + job.shape.in_group(group); ++chunk) {
            for (int64_t p = 0; p < plan.peers; ++p) cursors.items[p].start(chunk, plan, p);
            for (int64_t at = 0; at < size; at += kWindow) {
                const int64_t stop = at + kWindow < size ? at + kWindow : size;
                cursors.items[0].make_ready();
                for (int64_t p = 0; p < plan.peers; ++p) {
                    // Decoding is a long chain of few instructions: the next peer's runs beside this one's additions.
                    if (p + 1 < plan.peers) cursors.items[p + 1].make_ready();
                    fetch_share(job.anchor + chunk * size + at, stop - at, p, plan.peers);
                    cursors.items[p].add_until(sums, plan.weights, at, stop);
                }
                sums.finish(plan.weights);
                if (!write_window(target, chunk, at, stop, sums, s)) return false;
            }
        }
    }
    fence();
    *square = sum(s.square + s.upper);
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

template <typename I, typename W>
bool settle_into(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    return job.bf16 ? settle_groups<I, W, uint16_t>(plan, job, first, last, square)
                    : settle_groups<I, W, float>(plan, job, first, last, square);
}

template <typename I>
bool settle_mean(const SettlePlan& plan, const SettleJob& job, int64_t first, int64_t last, double* square) {
    if (plan.over == Mean::PEERS) return settle_into<I, Sums<double>>(plan, job, first, last, square);
    return mostly_alone(plan, job.shape) ? settle_into<I, Slots>(plan, job, first, last, square)
                                         : settle_into<I, Sums<Pair>>(plan, job, first, last, square);
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

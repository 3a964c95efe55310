// Mean over contributors where few values meet: most coordinates that anyone sent have one contributor, whose mean is
// the very value it sent. Such windows are half as large as sums, and the outer step on them needs no division.

namespace sparseloco::ISA_NAMESPACE {

// The last contributor of each coordinate of a window; those before it go to a log, and from there to sums. All
// is zero between windows.
struct Slots {
    using Value = Slot;
    static constexpr int kLogged = 2 * kTaken;

    alignas(64) Slot of[kWindow];
    alignas(64) Pair sums[kWindow];  // only of coordinates where values met
    Slot logged[kLogged];            // contributors that another has replaced, in the order of the peers
    uint16_t logged_at[kLogged];
    uint16_t met[kWindow + 1];  // coordinates whose sums are not zero
    int64_t logs, meetings;

    // A zero counts as sent, but as the sum of zero and weight times minus zero, it has no minus sign.
    static inline Slot value_of(float value, int64_t, int64_t peer) { return {value + 0.0f, uint32_t(peer + 1)}; }

    // No branch: whether values meet is hard to predict, and an entry that is none is overwritten by the next.
    template <typename I>
    inline void add_values(const I* index, int64_t n, int64_t first, const Slot* values, uint64_t codes) {
        int64_t count = logs;  // in a register
#if !defined(__clang__)
#pragma GCC unroll 4
#endif
        for (int64_t j = 0; j < n; ++j, codes >>= 2) {
            const int64_t at = int64_t(index[j]) - first;
            uint64_t before;  // both members in one load
            std::memcpy(&before, of + at, sizeof before);
            of[at] = values[codes & 3];
            std::memcpy(logged + count, &before, sizeof before);
            logged_at[count] = uint16_t(at);
            count += before != 0;
        }
        logs = count;
    }

    // Room in the log for a run of a cursor.
    inline void make_room(const int64_t* weights) {
        if (logs >= kLogged - kTaken) sum_logged(weights);
    }

    static inline void add_slot(Pair& sum, const Slot& slot, const int64_t* weights) {
        const double weight = double(weights[slot.owner - 1]);
        sum.total += weight * double(slot.value);
        sum.weight += weight;
    }

    inline void sum_logged(const int64_t* weights) {
        for (int64_t i = 0; i < logs; ++i) {
            Pair& sum = sums[logged_at[i]];
            met[meetings] = logged_at[i];
            meetings += sum.weight == 0;
            add_slot(sum, logged[i], weights);
        }
        logs = 0;
    }

    // Puts the means where values met into the slots.
    __attribute__((noinline)) void finish(const int64_t* weights) {
        sum_logged(weights);
        for (int64_t i = 0; i < meetings; ++i) {
            Pair& sum = sums[met[i]];
            Slot& slot = of[met[i]];
            add_slot(sum, slot, weights);
            slot.value = float(sum.total / sum.weight);
            sum = {};
        }
        meetings = 0;
    }
};

// Slots are for chunks of at least so many values per value sent. With random supports they take, against sums, 0.6 to
// 0.75 of the time at up to a quarter of a value sent per value, 0.85 at a half and at one, 1.3 at two (Zen 5, AVX-512,
// k from 16 to 1024, 1 to 16 peers). Where all of 16 peers send the same places, 1.0 at a quarter, 1.15 at a half.
constexpr int64_t kAloneShare = 2;

inline bool mostly_alone(const SettlePlan& plan, const GapShape& shape) {
    return !plan.general && plan.peers * shape.kept <= shape.chunk / kAloneShare;
}

// The outer step on sixteen values. Float64 holds more than twice the bits of float32 and two, so rounding a difference
// of float32 values to it first changes nothing: with a rate of one, float32 subtraction is the same.
template <bool UNIT>
inline bool move16(Slot* slots, float* anchor, const Step& s, D8& lower, D8& upper, F16& result) {
    const F16 update = load16(slots), from = load16(anchor);
    clear16(slots);
    const D8 a = wide(low(update)), b = wide(high(update));
    lower = lower + a * a;
    upper = upper + b * b;
    if (UNIT) result = from - update;
    else result = join(narrow(wide(low(from)) - a * s.lr), narrow(wide(high(from)) - b * s.lr));
    if (!sane(result)) return false;
    store16(anchor, result);
    return true;
}

// A row; written to `stream`, too, if that is not null. It is then whole lines.
template <bool UNIT, typename T>
__attribute__((noinline)) bool move_row(Slot* slots, float* anchor, T* stream, int64_t n, Step& s) {
    D8 lower = s.square, upper = s.upper;  // in registers
    F16 result;
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) {
        if (!move16<UNIT>(slots + c, anchor + c, s, lower, upper, result)) return false;
        if (stream) stream16(stream + c, result);
    }
    if (c < n) {
        alignas(64) Slot some[16] = {};
        float x[16] = {};
        std::memcpy(some, slots + c, size_t(n - c) * sizeof(Slot));
        std::memcpy(x, anchor + c, size_t(n - c) * sizeof(float));
        if (!move16<UNIT>(some, x, s, lower, upper, result)) return false;
        std::memset(static_cast<void*>(slots + c), 0, size_t(n - c) * sizeof(Slot));
        std::memcpy(anchor + c, x, size_t(n - c) * sizeof(float));
    }
    s.square = lower;
    s.upper = upper;
    return true;
}

}  // namespace sparseloco::ISA_NAMESPACE

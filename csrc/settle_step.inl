// The outer step on sums, eight values at a time.

namespace sparseloco::ISA_NAMESPACE {

// The plan's numbers in lanes, and the running sum of squares.
struct Step {
    D8 lr, momentum, decay, divisor, alpha, beta, square, upper;
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
    s.square = s.upper = all(0);
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

}  // namespace sparseloco::ISA_NAMESPACE

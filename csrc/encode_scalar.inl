// Error feedback of 32 values at a time, in loops that a compiler can vectorize.

namespace sparseloco::ISA_NAMESPACE {

struct Keys {
    uint16_t lane[32];
};
inline Keys no_keys() { return {}; }
inline Keys larger(Keys a, const Keys& b) {
    for (int i = 0; i < 32; ++i) a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
inline void store_keys(uint16_t* p, const Keys& keys) { std::memcpy(p, keys.lane, sizeof keys.lane); }

inline float live1(float x) { return x; }
inline float live1(uint16_t x) { return widen(x); }

// The anchor as the live parameter was given it; it is never NaN.
inline float as_live(const float*, float start) { return start; }
inline float as_live(const uint16_t*, float start) {
    const uint32_t u = bits_of(start);
    return float_of((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u);
}

template <typename T>
inline Keys feedback32(const float* start, const T* live, float* residual, float decay) {
    Keys keys;
    for (int i = 0; i < 32; ++i) {
        const float e = residual[i] * decay + (as_live(live, start[i]) - live1(live[i]));
        residual[i] = e;
        keys.lane[i] = uint16_t(bits_of(e) >> 16 & 0x7fff);
    }
    return keys;
}

}  // namespace sparseloco::ISA_NAMESPACE

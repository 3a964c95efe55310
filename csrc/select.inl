// Exact top-k of a chunk: the K values of largest magnitude, of equal ones the lowest position first.

namespace sparseloco::ISA_NAMESPACE {

// Vectors of keys behind one vector of maxima. Any border that K maxima reach is reached by K values; with four
// maxima for each kept value it is so close that about K / 8 values too many pass.
inline int64_t keys_per_maximum(int64_t padded, int64_t kept) {
    int64_t vectors = 16;
    while (vectors > 1 && padded / vectors < 4 * kept) vectors /= 2;
    return vectors;
}

// A key that at least `kept` of the maxima reach, and hardly more; 0 if too few differ from zero.
inline uint16_t safe_border(const uint16_t* maxima, int64_t n, int64_t kept, uint16_t hint) {
    const int64_t enough = kept + kept / 8;
    int32_t low = 0, high = 0x8000, step = 2;  // what `low` keeps is enough, what `high` keeps is not
    for (int32_t border = hint; high - low > 1;) {
        const int64_t count = count_keys(maxima, n, uint16_t(border));
        if (count >= kept) {
            low = border;
            if (count <= enough) break;
        } else {
            high = border;
        }
        // From the hint outwards in growing steps, then by halves.
        if (high == 0x8000) {
            border = low + step < high ? low + step : (low + high) / 2;
        } else if (low == 0) {
            border = high - step > 0 ? high - step : high / 2;
        } else {
            border = (low + high) / 2;
        }
        step *= 2;
    }
    return uint16_t(low);
}

// Keeps exactly K of n candidates; all of them reach the key `border`.
inline void refine(const EncodeScratch& s, int64_t n, int64_t kept, uint16_t border) {
    constexpr uint32_t none = 0x80000000u;
    uint32_t low = uint32_t(border) << 16, high = none, step = 1u << 17;
    int64_t count = n;  // that reach `low`
    while (count != kept && high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (high == none && step < middle - low) {  // the border is near: upwards in growing steps, then by halves
            middle = low + step;
            step *= 2;
        }
        const int64_t passing = count_magnitudes(s.magnitudes, n, middle);
        if (passing >= kept) {
            low = middle;
            count = passing;
        } else {
            high = middle;
        }
    }
    // Only equal magnitudes are left on the border where not exactly K reach it.
    const int64_t above = count == kept ? 0 : count_magnitudes(s.magnitudes, n, low + 1);
    keep(s, n, low, count == kept ? kept : kept - above);
}

// Fills `index` and `value` from the keys and the values of a chunk.
inline void select_top(EncodeScratch& s, const float* values, const FixedSection& section, int64_t maxima) {
    const int64_t padded = (section.chunk + 63) / 64 * 64;
    const uint16_t border = safe_border(maxima == padded ? s.keys : s.maxima, maxima, section.kept, s.threshold);
    int64_t n = section.chunk;
    if (border) {
        s.threshold = border;
        n = list_keys(s.keys, padded, border, s.candidates);
    } else {
        for (int64_t i = 0; i < n; ++i) s.candidates[i] = uint16_t(i);
    }
    fetch(values, s.candidates, n, s.bits, s.magnitudes);
    refine(s, n, section.kept, border);
}

}  // namespace sparseloco::ISA_NAMESPACE

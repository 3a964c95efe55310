// What all kernels share: where values live in memory, rounding to bfloat16, and splitting work over threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

// Each instruction set compiles these for itself. One that is not inlined would be a single symbol for all of them, and
// the linker may keep the copy of a set that this machine lacks.
#define SPARSELOCO_INLINE inline __attribute__((always_inline))

namespace sparseloco {

// A region of equal tiles of a row-major matrix; the C++ side of kernels/geometry.py. All in elements.
struct Geometry {
    int64_t first_row, panels, panel_height;  // panel p starts at row first_row + p * panel_height
    int64_t row_offset, col_offset;           // of the tiled rectangle inside a panel
    int64_t grid_rows, grid_cols;             // tiles of the rectangle
    int64_t rows, cols;                       // of one tile; a chunk has rows * cols values
    int64_t row_stride;                       // of the matrix

    SPARSELOCO_INLINE int64_t chunks() const { return panels * grid_rows * grid_cols; }

    // Offset of the first value of chunk n; its row r continues at + r * row_stride.
    SPARSELOCO_INLINE int64_t offset(int64_t n) const {
        const int64_t tile_col = n % grid_cols, rest = n / grid_cols;
        const int64_t tile_row = rest % grid_rows, panel = rest / grid_rows;
        const int64_t row = first_row + panel * panel_height + row_offset + tile_row * rows;
        return row * row_stride + col_offset + tile_col * cols;
    }
};

SPARSELOCO_INLINE uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

SPARSELOCO_INLINE float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

SPARSELOCO_INLINE float widen(uint16_t bf16) { return float_of(uint32_t(bf16) << 16); }

// Nearest, ties to even, NaN stays NaN: as torch rounds.
SPARSELOCO_INLINE uint16_t to_bf16(float x) {
    if (x != x) return 0x7fc0;
    const uint32_t u = bits_of(x);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Calls work(task) for every task in [0, tasks) from `threads` threads, in no particular order.
void parallel_for(int64_t tasks, int threads, const std::function<void(int64_t)>& work);

}  // namespace sparseloco

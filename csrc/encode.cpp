// Work of the encoder, cut into tasks of about equal size over all jobs, so that many small tensors share one start of
// the threads. Memory of a thread is made here and not in the kernels: library templates compiled for an instruction
// set must not become the copy that every set calls.
#include "encode.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.h"

namespace sparseloco {

namespace {

struct Task {
    int64_t job, first, last;
};

constexpr int64_t kTaskValues = 1 << 18;  // large against the start of a task, small against a layer

// Cuts `items` items of `values` values each into tasks.
void cut(std::vector<Task>& tasks, int64_t job, int64_t items, int64_t values) {
    const int64_t step = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, values));
    for (int64_t first = 0; first < items; first += step) tasks.push_back({job, first, std::min(items, first + step)});
}

// Memory for chunks and groups of one block.
class Scratch {
  public:
    explicit Scratch(const FixedSection& s) {
        const int64_t room = (s.chunk + 63) / 64 * 64 + 64;
        const int64_t low = s.low_bytes_of(s.per_group) + 64, unary = s.slot(s.per_group) + 64;
        const int64_t code = s.code_bytes_of(s.per_group) + 64;
        const int64_t sizes[] = {room * 2, room * 2, room * 2, room * 4, room * 4, room * 2 + 64, room * 4, room * 4,
                                 room * 4, room * 4, room / 4, low,      unary,    code};
        int64_t total = 64;
        for (const int64_t size : sizes) total += padded(size);
        memory_.reset(new uint8_t[size_t(total)]);
        next_ = memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64);
        take(all.keys, sizes[0]);
        take(all.maxima, sizes[1]);
        take(all.candidates, sizes[2]);
        take(all.bits, sizes[3]);
        take(all.magnitudes, sizes[4]);
        take(all.index, sizes[5]);
        all.index += 32;
        take(all.value, sizes[6]);
        take(all.start, sizes[7]);
        take(all.live, sizes[8]);
        take(all.residual, sizes[9]);
        take(all.block_offset, sizes[10]);
        take(all.low, sizes[11]);
        take(all.unary, sizes[12]);
        take(all.code, sizes[13]);
        all.threshold = 0x3f80 >> 1;
    }

    EncodeScratch all;

  private:
    static int64_t padded(int64_t size) { return (size + 63) / 64 * 64; }

    template <typename T>
    void take(T*& field, int64_t size) {
        field = reinterpret_cast<T*>(next_);
        next_ += padded(size);
    }

    std::unique_ptr<uint8_t[]> memory_;
    uint8_t* next_;
};

}  // namespace

namespace {

// Rows to scan, in bytes from one to the next.
struct Piece {
    int64_t job;
    const uint8_t* at;
    int64_t rows, cols, stride;
};

void cut_rows(std::vector<Piece>& pieces, int64_t job, const Values& v) {
    const int64_t width = v.bf16 ? 2 : 4;
    const bool single = v.rows == 1 || v.row_stride == v.cols;  // then in runs of values, else in runs of rows
    const int64_t items = single ? v.rows * v.cols : v.rows, stride = (single ? 1 : v.row_stride) * width;
    std::vector<Task> tasks;
    cut(tasks, job, items, single ? 1 : v.cols);
    for (const Task& t : tasks) {
        const uint8_t* at = static_cast<const uint8_t*>(v.data) + t.first * stride;
        const int64_t count = t.last - t.first;
        pieces.push_back({job, at, single ? 1 : count, single ? count : v.cols, stride});
    }
}

}  // namespace

void max_magnitudes(const Values* jobs, int64_t count, int threads, uint32_t* bits) {
    std::vector<Piece> pieces;
    for (int64_t j = 0; j < count; ++j) cut_rows(pieces, j, jobs[j]);
    std::vector<uint32_t> largest(pieces.size());
    parallel_for(int64_t(pieces.size()), threads, [&](int64_t i) {
        const Piece& piece = pieces[size_t(i)];
        for (int64_t row = 0; row < piece.rows; ++row) {
            const uint8_t* at = piece.at + row * piece.stride;
            const uint32_t most = kernels().encode.max_magnitude(at, jobs[piece.job].bf16, piece.cols);
            largest[size_t(i)] = std::max(largest[size_t(i)], most);
        }
    });
    std::fill(bits, bits + count, 0u);
    for (size_t i = 0; i < pieces.size(); ++i) bits[pieces[i].job] = std::max(bits[pieces[i].job], largest[i]);
}

void ef_passes(const EncodeJob* jobs, int64_t count, float decay, int threads) {
    std::vector<Task> tasks;
    for (int64_t j = 0; j < count; ++j) cut(tasks, j, jobs[j].section.chunks, jobs[j].section.chunk);
    parallel_for(int64_t(tasks.size()), threads, [&](int64_t i) {
        const Task& task = tasks[size_t(i)];
        Scratch scratch(jobs[task.job].section);
        kernels().encode.ef_pass(jobs[task.job], decay, task.first, task.last, scratch.all);
    });
}

void encode_all(const EncodeJob* jobs, int64_t count, const EncodeRule& rule, int threads) {
    std::vector<Task> tasks;
    for (int64_t j = 0; j < count; ++j) {
        const FixedSection& s = jobs[j].section;
        cut(tasks, j, s.groups(), s.per_group * s.chunk);
    }
    parallel_for(int64_t(tasks.size()), threads, [&](int64_t i) {
        const Task& task = tasks[size_t(i)];
        Scratch scratch(jobs[task.job].section);
        kernels().encode.encode(jobs[task.job], rule, task.first, task.last, scratch.all);
    });
}

}  // namespace sparseloco

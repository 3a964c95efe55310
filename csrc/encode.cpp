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
        const int64_t low = s.low_bytes(s.group) + 64, unary = s.slot_bytes(s.group) + 64, code = s.code_bytes(s.group) + 64;
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

void max_magnitudes(const Values* jobs, int64_t count, int threads, uint32_t* bits) {
    std::vector<Task> tasks;  // of rows, or of runs of a single long row
    std::vector<Values> flat(jobs, jobs + count);
    constexpr int64_t run = 4096;
    for (int64_t j = 0; j < count; ++j) {
        Values& v = flat[size_t(j)];
        if (v.row_stride == v.cols || v.rows == 1) {  // one row, seen as rows of `run` values; the last may be short
            const int64_t all = v.rows * v.cols;
            v = {v.data, v.bf16, all, 0, run};
            cut(tasks, j, (all + run - 1) / run, run);
        } else {
            cut(tasks, j, v.rows, v.cols);
        }
    }
    std::vector<uint32_t> largest(tasks.size());
    parallel_for(int64_t(tasks.size()), threads, [&](int64_t i) {
        const Task& task = tasks[size_t(i)];
        const Values& v = flat[size_t(task.job)];
        const int64_t width = v.bf16 ? 2 : 4;
        const uint8_t* at = static_cast<const uint8_t*>(v.data) + task.first * v.row_stride * width;
        const auto scan = kernels().encode.max_magnitude;
        if (!v.cols) {
            largest[size_t(i)] = scan(at, v.bf16, std::min(task.last * run, v.rows) - task.first * run);
            return;
        }
        for (int64_t row = task.first; row < task.last; ++row, at += v.row_stride * width)
            largest[size_t(i)] = std::max(largest[size_t(i)], scan(at, v.bf16, v.cols));
    });
    std::fill(bits, bits + count, 0u);
    for (size_t i = 0; i < tasks.size(); ++i) bits[tasks[i].job] = std::max(bits[tasks[i].job], largest[i]);
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
        cut(tasks, j, s.groups(), s.group * s.chunk);
    }
    parallel_for(int64_t(tasks.size()), threads, [&](int64_t i) {
        const Task& task = tasks[size_t(i)];
        Scratch scratch(jobs[task.job].section);
        kernels().encode.encode(jobs[task.job], rule, task.first, task.last, scratch.all);
    });
}

}  // namespace sparseloco

// Splits settling over threads; results do not depend on how many.
#include "settle.h"

#include <algorithm>
#include <atomic>

#include "kernels.h"

namespace sparseloco {

namespace {

struct Task {
    int64_t job, first, last;  // groups
};

constexpr int64_t kValuesPerTask = 1 << 18;

// The same tasks for any number of threads, so that sums over tasks have one order.
std::vector<Task> tasks_of(const std::vector<SettleJob>& jobs) {
    std::vector<Task> tasks;
    for (size_t i = 0; i < jobs.size(); ++i) {
        const GapShape& shape = jobs[i].shape;
        const int64_t step = std::max<int64_t>(1, kValuesPerTask / (shape.per_group * shape.chunk));
        for (int64_t first = 0; first < shape.groups(); first += step)
            tasks.push_back({int64_t(i), first, std::min(first + step, shape.groups())});
    }
    return tasks;
}

}  // namespace

Settled settle_all(const SettlePlan& plan, const std::vector<SettleJob>& jobs, int threads) {
    const std::vector<Task> tasks = tasks_of(jobs);
    const int64_t count = int64_t(tasks.size());
    std::vector<double> squares(tasks.size(), 0.0);
    std::atomic<int64_t> failed{count};
    parallel_for(count, threads, [&](int64_t i) {
        // Tasks start in ascending order, so all below the first failing one are run whatever the threads do.
        if (i > failed.load()) return;
        const Task& task = tasks[size_t(i)];
        if (kernels().settle.settle(plan, jobs[size_t(task.job)], task.first, task.last, &squares[size_t(i)])) return;
        for (int64_t seen = failed.load(); i < seen && !failed.compare_exchange_weak(seen, i);) {}
    });
    Settled out;
    out.squares.assign(jobs.size(), 0.0);
    for (size_t i = 0; i < tasks.size(); ++i) out.squares[size_t(tasks[i].job)] += squares[i];
    if (failed.load() < count) out.failed = tasks[size_t(failed.load())].job;
    return out;
}

void apply_all(const std::vector<SettleJob>& jobs, int threads) {
    const std::vector<Task> tasks = tasks_of(jobs);
    parallel_for(int64_t(tasks.size()), threads, [&](int64_t i) {
        const Task& task = tasks[size_t(i)];
        kernels().settle.apply(jobs[size_t(task.job)], task.first, task.last);
    });
}

}  // namespace sparseloco

#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

namespace sparseloco {

namespace {

bool available(const Kernels& set) {
#ifdef SPARSELOCO_X86
    const std::string name = set.name;
    __builtin_cpu_init();
    if (name == "avx2") {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
               __builtin_cpu_supports("popcnt");
    }
    if (name == "avx512") {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
               __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("bmi2");
    }
#endif
    return &set == &scalar_kernels;
}

std::vector<const Kernels*> all() {
#ifdef SPARSELOCO_X86
    return {&avx512_kernels, &avx2_kernels, &scalar_kernels};
#else
    return {&scalar_kernels};
#endif
}

const Kernels* fastest() {
    for (const Kernels* set : all())
        if (available(*set)) return set;
    return &scalar_kernels;
}

std::atomic<const Kernels*>& chosen() {
    static std::atomic<const Kernels*> set{fastest()};
    return set;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_acquire); }

bool select(const char* name) {
    for (const Kernels* set : all()) {
        if (std::string(name) == set->name && available(*set)) {
            chosen().store(set, std::memory_order_release);
            return true;
        }
    }
    return false;
}

void parallel_for(int64_t tasks, int threads, const std::function<void(int64_t)>& work) {
    std::atomic<int64_t> next{0};
    std::exception_ptr failure;
    std::mutex guard;
    // What fails in any thread is thrown again once all have ended; it must not end the process.
    const auto loop = [&] {
        try {
            for (int64_t task = next++; task < tasks; task = next++) work(task);
        } catch (...) {
            const std::lock_guard<std::mutex> held(guard);
            if (!failure) failure = std::current_exception();
            next = tasks;
        }
    };
    std::vector<std::thread> helpers;
    try {
        for (int i = 1; i < threads && i < tasks; ++i) helpers.emplace_back(loop);
    } catch (const std::exception&) {
        // No more threads or memory: those that are there do the work.
    }
    loop();
    for (auto& helper : helpers) helper.join();
    if (failure) std::rethrow_exception(failure);
}

}  // namespace sparseloco

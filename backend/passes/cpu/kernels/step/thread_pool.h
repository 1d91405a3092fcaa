// The threads that divide a step's work.

#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "vectors/vectors.h"

namespace {

inline i64 now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return i64(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// Makes a waiting thread leave the core's resources to its sibling for some ten cycles.
inline void cpu_relax() {
#ifdef __aarch64__
    asm volatile("isb");  // `yield` does nothing on most CPUs
#else
    _mm_pause();
#endif
}

// The calling thread and its workers. Threads claim chunks one by one, so a thread that loses its core delays one chunk
// and not a fixed share of the job. After a job a worker spins for spin_ns and then sleeps on a futex.
class ThreadPool {
  public:
    ThreadPool(int num_threads, i64 spin_ns)
        : num_threads_(num_threads), spin_ns_(spin_ns), next_(num_threads), busy_(num_threads) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // workers inherit it: Python's threads handle the signals
        for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~ThreadPool() {
        stop_.store(true);
        publish(0);
        for (auto& worker : workers_) worker.join();
    }

    int num_threads() const { return num_threads_; }

    // Wakes the workers for a job that follows soon: they spin for it.
    void wake() {
        if (num_threads_ > 1) publish(0);
    }

    // Calls body(chunk, thread) for every chunk in [0, num_chunks), the highest first. Returns when all are done.
    template <class F> void run(i64 num_chunks, const F& body) {
        if (num_chunks <= 1 || num_threads_ == 1) {
            const i64 started_ns = times_ ? now_ns() : 0;
            for (i64 chunk = num_chunks - 1; chunk >= 0; --chunk) body(chunk, 0);
            if (times_) busy_[0].ns += now_ns() - started_ns;
            return;
        }
        call_.store([](const void* context, i64 chunk, int thread) { (*static_cast<const F*>(context))(chunk, thread); },
                    std::memory_order_relaxed);
        context_.store(&body, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        const std::uint32_t epoch = publish(std::uint32_t(num_chunks));
        claim(epoch, 0);
        for (int spins = 0; done_.load(std::memory_order_acquire) < num_chunks; ++spins) {
            if (spins < 4000) cpu_relax();
            else sched_yield();
        }
    }

    // Calls body(chunk) for every chunk in [0, num_chunks). Neighbouring chunks go to the same thread: each takes its own
    // range in ascending order, then what the others have left. Returns when all are done.
    template <class F> void run_ranges(i64 num_chunks, const F& body) {
        const auto start = [&](i64 range) { return num_chunks * range / num_threads_; };
        for (int range = 0; range < num_threads_; ++range) next_[range].chunk.store(start(range), std::memory_order_relaxed);
        run(num_threads_, [&](i64, int thread) {
            for (int i = 0; i < num_threads_; ++i) {
                const int range = (thread + i) % num_threads_;
                std::atomic<i64>& next = next_[range].chunk;
                const i64 end = start(range + 1);
                while (next.load(std::memory_order_relaxed) < end)
                    if (const i64 chunk = next.fetch_add(1, std::memory_order_relaxed); chunk < end) body(chunk);
            }
        });
    }

    // From here to stop_timing the threads add up the time in which they work on chunks. Only between jobs.
    void start_timing() {
        for (BusyTime& busy : busy_) busy.ns = 0;
        times_ = true;
    }

    // Returns the nanoseconds of all threads.
    i64 stop_timing() {
        times_ = false;
        i64 total_ns = 0;
        for (const BusyTime& busy : busy_) total_ns += busy.ns;
        return total_ns;
    }

  private:
    using Call = void (*)(const void*, i64, int);

    // A ticket is epoch << 32 | unclaimed chunks. A thread that claims a chunk of epoch e knows that job e is not over,
    // so call_ and context_, which it read after it saw e, belong to job e.
    std::uint32_t publish(std::uint32_t num_chunks) {
        const std::uint32_t epoch = std::uint32_t(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(std::uint64_t(epoch) << 32 | num_chunks, std::memory_order_seq_cst);
        signal_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0)
            syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&signal_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
        return epoch;
    }

    void claim(std::uint32_t epoch, int thread) {
        const Call call = call_.load(std::memory_order_relaxed);
        const void* context = context_.load(std::memory_order_relaxed);
        const bool times = times_;
        const i64 started_ns = times ? now_ns() : 0;
        i64 finished = 0;
        std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (std::uint32_t(ticket >> 32) == epoch && std::uint32_t(ticket) > 0) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            call(context, i64(std::uint32_t(ticket)) - 1, thread);
            ++finished;
            ticket = ticket_.load(std::memory_order_acquire);
        }
        if (!finished) return;
        if (times) busy_[thread].ns += now_ns() - started_ns;
        done_.fetch_add(finished, std::memory_order_release);
    }

    void work(int thread) {
        std::uint32_t seen = 0;
        while (!stop_.load(std::memory_order_acquire)) {
            const std::uint32_t epoch = await_job(seen);
            claim(epoch, thread);
            seen = epoch;
        }
    }

    std::uint32_t current_epoch() const { return std::uint32_t(ticket_.load(std::memory_order_seq_cst) >> 32); }

    std::uint32_t await_job(std::uint32_t seen) {
        const i64 deadline = now_ns() + spin_ns_;
        while (now_ns() < deadline)
            for (int i = 0; i < 32; ++i) {
                if (const std::uint32_t epoch = current_epoch(); epoch != seen) return epoch;
                cpu_relax();
            }
        for (;;) {
            const std::uint32_t signal = signal_.load(std::memory_order_seq_cst);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            if (current_epoch() == seen)
                syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&signal_), FUTEX_WAIT_PRIVATE, signal, nullptr, nullptr, 0);
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
            if (const std::uint32_t epoch = current_epoch(); epoch != seen) return epoch;
        }
    }

    struct alignas(64) NextChunk {
        std::atomic<i64> chunk{0};
    };

    struct alignas(64) BusyTime {
        i64 ns = 0;
    };

    const int num_threads_;
    const i64 spin_ns_;
    std::vector<NextChunk> next_;  // of each thread's range
    std::vector<BusyTime> busy_;   // one for each thread
    std::atomic<bool> times_{false};
    alignas(64) std::atomic<std::uint64_t> ticket_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> context_{nullptr};
    alignas(64) std::atomic<i64> done_{0};
    alignas(64) std::atomic<std::uint32_t> signal_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

}  // namespace

// Runs steps one after the other on a thread of its own: each begins where the one before ends, without the interpreter.

#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "rows/sampling.h"

namespace {

struct QueuedWork {  // mirrored by step_queue.py
    const StepRows* rows;  // of a step to compute, or null
    const Operation* operations;
    i64 count;
    const SampledRows* sampled;  // logits to sample, or null
    std::int32_t* last_tokens;   // [slots] sampled last
};

// While work is queued nobody else uses the engine. What the work points to lives until it is done.
class StepQueue {
  public:
    explicit StepQueue(Engine& engine) : engine_(engine) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // as in ThreadPool
        thread_ = std::thread([this] { drive(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Ends what is queued first.
    ~StepQueue() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            is_closed_ = true;
        }
        has_work_.notify_one();
        thread_.join();
    }

    // Returns the work's number, counted from 1.
    i64 put(const QueuedWork& work) {
        const std::lock_guard<std::mutex> lock(mutex_);
        queued_.push_back(work);
        has_work_.notify_one();
        return ++num_put_;
    }

    void await(i64 number) {
        std::unique_lock<std::mutex> lock(mutex_);
        has_ended_.wait(lock, [&] { return num_ended_ >= number; });
    }

    // What is left of the works up to this one is skipped.
    void skip(i64 number) { num_skipped_.store(number, std::memory_order_relaxed); }

  private:
    void drive() {
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex_);
            has_work_.wait(lock, [&] { return is_closed_ || !queued_.empty(); });
            if (queued_.empty()) return;
            const QueuedWork work = queued_.front();
            const i64 number = num_ended_ + 1;
            lock.unlock();
            run(work, number);
            lock.lock();
            queued_.pop_front();
            num_ended_ = number;
            has_ended_.notify_all();
        }
    }

    bool is_skipped(i64 number) const { return num_skipped_.load(std::memory_order_relaxed) >= number; }

    void run(const QueuedWork& work, i64 number) {
        if (work.rows && !is_skipped(number)) {
            resolve_tokens(*work.rows, work.last_tokens);
            plan_step(engine_, *work.rows);
        }
        for (i64 i = 0; i < work.count && !is_skipped(number); ++i)
            run_operations(engine_, work.operations + i, 1, nullptr);
        if (!work.sampled || is_skipped(number)) return;
        const SampledRows& rows = *work.sampled;
        sample(engine_, rows);
        for (i64 r = 0; r < rows.num_rows; ++r) work.last_tokens[rows.slot_of_row[r]] = std::max(rows.tokens[r], 0);
    }

    // Replaces FROM_SLOT.
    static void resolve_tokens(const StepRows& rows, const std::int32_t* last_tokens) {
        std::int32_t* ids = const_cast<std::int32_t*>(rows.arrays);
        const std::int32_t* starts = rows.arrays + rows.num_tokens;
        const std::int32_t* slots = starts + rows.num_rows + 1 + rows.num_rows;
        for (i64 row = 0; row < rows.num_rows; ++row)
            for (i64 i = starts[row]; i < starts[row + 1]; ++i)
                if (ids[i] == -1) ids[i] = last_tokens[slots[row]];
    }

    Engine& engine_;
    std::mutex mutex_;
    std::condition_variable has_work_, has_ended_;
    std::deque<QueuedWork> queued_;
    i64 num_put_ = 0, num_ended_ = 0;
    std::atomic<i64> num_skipped_{0};
    bool is_closed_ = false;
    std::thread thread_;
};

}  // namespace

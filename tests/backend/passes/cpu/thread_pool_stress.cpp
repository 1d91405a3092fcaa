// Runs many jobs on the kernels' thread pool, each on the results of the one before: usage: THREADS SPIN_NS JOBS. For
// ThreadSanitizer, which reports memory that two threads access in no order, on any CPU.

#include <cstdio>
#include <cstdlib>

#include "step/thread_pool.h"

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const int num_threads = std::atoi(argv[1]), num_jobs = std::atoi(argv[3]);
    for (int pools = 0; pools < 3; ++pools) {
        ThreadPool pool(num_threads, std::atoll(argv[2]));
        std::vector<i64> numbers(40, pools), next(40);
        for (int job = 0; job < num_jobs; ++job) {
            const i64 chunks = 1 + job % 40;
            if (job % 100 == 0) pool.start_timing();
            if (job % 3 == 0) pool.wake();
            if (job % 2 == 0) pool.run(chunks, [&](i64 chunk, int) { next[chunk] = numbers[chunk] + 1; });
            else pool.run_ranges(chunks, [&](i64 chunk) { next[chunk] = numbers[chunk] + 1; });
            if (job % 100 == 0 && pool.stop_timing() <= 0) return 3;
            for (i64 chunk = 0; chunk < chunks; ++chunk) {
                if (next[chunk] != numbers[chunk] + 1) return 1;
                numbers[chunk] = next[chunk];
            }
        }
    }
    std::puts("complete");
    return 0;
}

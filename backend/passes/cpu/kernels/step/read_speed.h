// Reads memory as fast as the threads can, to compare operations with it that memory limits.

#pragma once

#include "step/step_queue.h"

namespace {

// Returns the sum, so that no load is left out. floats: a multiple of 128. Threads read chunks of 1 MB.
inline float read_memory(Engine& engine, const float* memory, i64 floats) {
    constexpr i64 chunk_floats = 1 << 18;
    std::vector<float> sums((floats + chunk_floats - 1) / chunk_floats);
    engine.pool.run_ranges(i64(sums.size()), [&](i64 chunk) {
        const i64 end = std::min(floats, (chunk + 1) * chunk_floats);
        Floats acc[8];
        for (Floats& each : acc) each = broadcast(0.0f);
        for (i64 i = chunk * chunk_floats; i < end; i += 128)
#pragma GCC unroll 8
            for (int v = 0; v < 8; ++v) {
                prefetch_ahead(memory + i + 16 * v);
                acc[v] = add(acc[v], load(memory + i + 16 * v));
            }
        for (int v = 1; v < 8; ++v) acc[0] = add(acc[0], acc[v]);
        sums[chunk] = sum(acc[0]);
    });
    float total = 0.0f;
    for (const float each : sums) total += each;
    return total;
}

}  // namespace

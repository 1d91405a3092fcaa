// LoRA: adds up (down x) of each row's adapter to the outputs of a linear.
//
//   down  [ranks][inputs]
//   up    of each part [strip of 16 outputs][rank][16]; zeros fill the last strip
//
// Each sum is computed by itself and in a fixed order, so a row's result is the same bits in any batch.

#pragma once

#include "vectors/tiles.h"

namespace {

constexpr i64 kRanksAtOnce = 4;

// The adapter of a row of the step's arrays for this linear; null for a row without one.
inline const Adapter* adapter_of(const Engine& engine, const Linear& linear, i64 row) {
    if (!linear.adapters || !engine.step.has_adapters) return nullptr;
    const std::int32_t index = engine.step.adapter(row);
    return index < 0 || linear.adapters[index].num_parts == 0 ? nullptr : linear.adapters + index;
}

// Where the results of `run_down` for a row lie.
inline float* ranks_of(Engine& engine, const Linear& linear, i64 row) {
    return engine.ranks.data() + row * linear.most_ranks;
}
inline const float* ranks_of(const Engine& engine, const Linear& linear, i64 row) {
    return engine.ranks.data() + row * linear.most_ranks;
}

template <class T> void multiply_ranks(const T* x, const T* down, i64 inputs, float* out) {
    Floats sums[kRanksAtOnce];
    for (auto& each : sums) each = broadcast(0.0f);
    for (i64 k = 0; k < inputs; k += 16) {
        const Floats values = load(x + k, inputs - k);
#pragma GCC unroll 4
        for (int r = 0; r < kRanksAtOnce; ++r) sums[r] = fmadd(values, load(down + r * inputs + k, inputs - k), sums[r]);
    }
    for (int r = 0; r < kRanksAtOnce; ++r) out[r] = sum(sums[r]);
}

// Fills engine.ranks: for each row of x with an adapter its product with `down`.
template <class T> void run_down(Engine& engine, const Linear& linear, const T* x) {
    if (!linear.adapters || !engine.step.has_adapters) return;
    const i64 rows = engine.step.rows(), groups = linear.most_ranks / kRanksAtOnce;
    if (i64(engine.ranks.size()) < rows * linear.most_ranks) engine.ranks.resize(rows * linear.most_ranks);
    engine.split(rows * groups, std::max<i64>(1, 8192 / linear.inputs), [&](i64 first, i64 last, int) {
        for (i64 item = first; item < last; ++item) {
            const i64 row = item / groups, rank = item % groups * kRanksAtOnce;
            const Adapter* adapter = adapter_of(engine, linear, row);
            if (adapter && rank < adapter->num_ranks)
                multiply_ranks(x + row * linear.inputs, static_cast<const T*>(adapter->down) + rank * linear.inputs,
                               linear.inputs, ranks_of(engine, linear, row) + rank);
        }
    });
}

// What an adapter adds to 16 outputs from `column` on; columns of up follow those of gate. ranks: of the row.
template <class T> Floats lora_output(const Adapter& adapter, const float* ranks, i64 column) {
    Floats sum = broadcast(0.0f);
    for (i64 p = 0; p < adapter.num_parts; ++p) {
        const AdapterPart& part = adapter.parts[p];
        if (column < part.first_output || column >= part.end_output) continue;
        const T* up = static_cast<const T*>(part.up) + (column - part.first_output) / 16 * 16 * part.num_ranks;
        for (i64 r = 0; r < part.num_ranks; ++r)
            sum = fmadd(broadcast(ranks[part.first_rank + r]), load(up + 16 * r), sum);
    }
    return sum;
}

}  // namespace

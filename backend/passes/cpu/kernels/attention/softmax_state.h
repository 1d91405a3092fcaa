// The running softmax of query rows.

#pragma once

#include "attention/block_products.h"

namespace {

// The running softmax of each query row: weighted values, largest score, sum of weights. The sum is 0 until a row has
// seen a position.
struct SoftmaxState {
    float* acc;  // [rows][head_dim]
    float* peaks;
    float* sums;

    static i64 floats(i64 rows, i64 dim) { return rows * (dim + 2); }
    SoftmaxState(float* memory, i64 rows, i64 dim) : acc(memory), peaks(memory + rows * dim), sums(peaks + rows) {}

    void clear(i64 rows, i64 dim) const {
        std::memset(acc, 0, rows * dim * sizeof(float));
        for (i64 r = 0; r < rows; ++r) {
            peaks[r] = -std::numeric_limits<float>::infinity();
            sums[r] = 0.0f;
        }
    }

    // The rows from `first` on.
    SoftmaxState rows_from(i64 first, i64 dim) const {
        SoftmaxState part = *this;
        part.acc += first * dim;
        part.peaks += first;
        part.sums += first;
        return part;
    }

    // For a result of another thread: it lies in that core's cache.
    void prefetch(i64 rows, i64 dim) const {
        for (i64 i = 0; i < rows * dim; i += 16) __builtin_prefetch(acc + i);
        __builtin_prefetch(peaks);
        __builtin_prefetch(sums);
    }

    // What turns the weighted values of a complete row into its result, if a score without a value, the sink, takes part
    // in its softmax.
    float factor_with_sink(i64 row, float sink) const {
        const float score = sink * kLog2E, peak = std::max(peaks[row], score);
        const float own = std::exp2(peaks[row] - peak);
        return own / (sums[row] * own + std::exp2(score - peak));
    }

    // Adds the result over later positions.
    void merge(const SoftmaxState& later, i64 rows, i64 dim) const {
        for (i64 r = 0; r < rows; ++r) {
            if (later.sums[r] == 0.0f) continue;
            const float peak = std::max(peaks[r], later.peaks[r]);
            const float mine = sums[r] == 0.0f ? 0.0f : std::exp2(peaks[r] - peak);
            const float theirs = std::exp2(later.peaks[r] - peak);
            for (i64 d = r * dim; d < (r + 1) * dim; d += 16)
                store(acc + d, fmadd(load(later.acc + d), broadcast(theirs), mul(load(acc + d), broadcast(mine))));
            sums[r] = sums[r] * mine + later.sums[r] * theirs;
            peaks[r] = peak;
        }
    }
};

// The positions [from, to) of a block that a query may see; none if from >= to.
struct Visible {
    i64 from, to;

    bool none() const { return from >= to; }
};

// Adds a block to the softmax of each row: scores [rows][kBlock], times a scale for each row and capped if softcap > 0,
// become weights. Peaks and sums are updated, weighted values are not: `factors` are what those over earlier blocks are
// to be multiplied by. `tops` are about the largest weights of the block. weights may be scores.
template <class W>
void update_softmax(i64 rows, float* scores, const float* scales, float softcap, const Visible* visible,
                    const SoftmaxState& state, float* factors, float* tops, W* weights) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const Floats hidden = broadcast(-infinity), one = broadcast(1.0f);
    for (i64 r = 0; r < rows; ++r) {
        float* row = scores + r * kBlock;
        const Visible range = visible[r];
        const Floats scale = broadcast(softcap > 0.0f ? cap_scores(row, kBlock, scales[r], softcap) : scales[r]);
        Floats top = hidden;
        for (i64 at = 0; at < kBlock; at += 16) {
            Floats scaled = mul(load(row + at), scale);
            if (range.from > 0 || range.to < kBlock)
                scaled = select(lanes_between(range.from - at, range.to - at), scaled, hidden);
            store(row + at, scaled);
            top = max(top, scaled);
        }
        tops[r] = largest(top);
    }
    for (i64 r = 0; r < rows; r += 16) {
        const i64 count = rows - r;
        const Floats before = load(state.peaks + r, count), top = load(tops + r, count), peak = max(before, top);
        // Both may be -infinity, for rows that have seen no position.
        const Floats factor = select(less_than(before, peak), exp2_negative(sub(before, peak)), one);
        store(factors + r, factor, count);
        store(tops + r, select(less_than(top, peak), exp2_negative(sub(top, peak)), one), count);
        store(state.peaks + r, peak, count);
        store(state.sums + r, mul(load(state.sums + r, count), factor), count);
    }
    for (i64 r = 0; r < rows; ++r) {
        W* row = weights + r * kBlock;
        if (visible[r].none()) {
            std::memset(row, 0, kBlock * sizeof(W));
            continue;
        }
        const Floats peak = broadcast(state.peaks[r]);
        Floats total = broadcast(0.0f);
        for (i64 at = 0; at < kBlock; at += 16) {
            const Floats weight = exp2_negative(sub(load(scores + r * kBlock + at), peak));
            total = add(total, weight);
            store(row + at, weight);
        }
        state.sums[r] += sum(total);
    }
}

}  // namespace

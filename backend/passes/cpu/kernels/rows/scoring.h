// Log probabilities of known tokens, and of the most likely ones, from rows of logits.

#pragma once

#include "step/operations.h"

namespace {

constexpr i64 kScoreBlock = 64;  // logits that are compared with the top tokens together

struct ScoredRows {  // mirrored by native_structs.py
    const float* logits;  // [num_rows][vocab]
    const std::int32_t* next_ids;
    i64 num_rows;
    i64 vocab;
    i64 num_top;  // at most vocab
    float* chosen;        // [num_rows]; NaN if a logit is NaN, or the largest is not finite
    std::int32_t* ranks;  // [num_rows]
    std::int32_t* top_ids;  // [num_rows][num_top], most likely first, equal ones by id
    float* top;
};

inline float largest_of(const float* x, i64 n) {
    Floats most = broadcast(-std::numeric_limits<float>::infinity());
    i64 i = 0;
    for (; i + 16 <= n; i += 16) most = max(most, load(x + i));
    float top = largest(most);
    for (; i < n; ++i) top = std::max(top, x[i]);
    return top;
}

// The sum of exp(x - peak). Short sums in fp32 are added in double, always the same ones.
inline double sum_of_powers(const float* x, i64 n, float peak) {
    double total = 0.0;
    for (i64 first = 0; first < n; first += 16 * kScoreBlock) {
        const i64 end = std::min(n, first + 16 * kScoreBlock);
        Floats part = broadcast(0.0f);
        for (i64 i = first; i < end; i += 16) {
            const Floats power = exp2_negative(mul(sub(load(x + i, end - i), broadcast(peak)), broadcast(kLog2E)));
            part = add(part, end - i >= 16 ? power : select(lanes_between(0, end - i), power, broadcast(0.0f)));
        }
        total += sum(part);
    }
    return total;
}

// The top logits, [num_top], and their ids.
inline void take_top(const float* x, i64 n, i64 num_top, float* top, std::int32_t* ids) {
    i64 count = 0;
    for (i64 first = 0; first < n; first += kScoreBlock) {
        const i64 end = std::min(n, first + kScoreBlock);
        if (count == num_top && !(largest_of(x + first, end - first) > top[num_top - 1])) continue;
        for (i64 i = first; i < end; ++i) {
            if (count == num_top && !(x[i] > top[num_top - 1])) continue;
            i64 place = count < num_top ? count++ : num_top - 1;
            for (; place > 0 && x[i] > top[place - 1]; --place) top[place] = top[place - 1], ids[place] = ids[place - 1];
            top[place] = x[i], ids[place] = std::int32_t(i);
        }
    }
}

// The log probability of a token and its rank, and the num_top most likely tokens.
inline void score_token(const float* x, i64 vocab, std::int32_t token, i64 num_top, float& chosen, std::int32_t& rank,
                        float* top, std::int32_t* top_ids) {
    const float own = x[token], peak = largest_of(x, vocab);
    const double log_sum = double(peak) + std::log(sum_of_powers(x, vocab, peak));
    std::int32_t reaching = 0;
    for (i64 i = 0; i < vocab; ++i) reaching += x[i] >= own;
    chosen = float(own - log_sum);
    rank = reaching;
    if (num_top == 0) return;
    take_top(x, vocab, num_top, top, top_ids);
    for (i64 i = 0; i < num_top; ++i) top[i] = float(top[i] - log_sum);
}

inline void score_row(const ScoredRows& rows, i64 r) {
    score_token(rows.logits + r * rows.vocab, rows.vocab, rows.next_ids[r], rows.num_top, rows.chosen[r], rows.ranks[r],
                rows.top + r * rows.num_top, rows.top_ids + r * rows.num_top);
}

// The operations compute the logits of rows.num_rows tokens of a step that was run.
inline void score(Engine& engine, const Operation* operations, i64 count, const ScoredRows& rows) {
    engine.step.is_narrowed = true;
    engine.step.num_narrowed = rows.num_rows;
    run_operations(engine, operations, count, nullptr);
    engine.pool.run(rows.num_rows, [&](i64 r, int) { score_row(rows, r); });
}

}  // namespace

// DRY: makes tokens less likely that would continue a repetition. Names and meaning are llama.cpp's.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "step/operations.h"

namespace {

constexpr float kMaxDryPenalty = 1e30f;  // leaves logits finite

// A breaker is a run of tokens that no repetition extends over.
struct DrySettings {  // mirrored by native_sampling.py
    std::int32_t* tokens;              // the sequence's, by position; has room for the next. Negative: no token
    const std::uint32_t* heads_mask;   // a bit for each token: whether a breaker begins with it
    const std::int32_t* heads;         // the first token of each breaker, ascending; of equal ones the shortest first
    const i64* tails;                  // [num_breakers + 1] where the others of each begin in tail_tokens
    const std::int32_t* tail_tokens;
    i64 num_breakers;
    i64 window;  // the last tokens, among which repetitions count
    i64 allowed_length;
    double multiplier;
    double base;
};

// A thread's memory for a row.
struct DryScratch {
    std::vector<i64> matches;
    std::vector<i64> longest;  // of each token: 1 + the longest repetition that it would continue, else 0
    std::vector<std::int32_t> continuing;
};

inline const std::int32_t* breakers_of(const DrySettings& dry, std::int32_t head) {
    if (!(dry.heads_mask[head >> 5] >> (head & 31) & 1)) return dry.heads + dry.num_breakers;
    return std::lower_bound(dry.heads, dry.heads + dry.num_breakers, head);
}

// How many of the last tokens lie behind the last breaker.
inline i64 length_since_breaker(const DrySettings& dry, const std::int32_t* tokens, i64 n) {
    for (i64 i = 0; i < n; ++i) {
        const std::int32_t head = tokens[n - 1 - i];
        if (head < 0) return i;
        i64 longest = -1;
        for (i64 b = breakers_of(dry, head) - dry.heads; b < dry.num_breakers && dry.heads[b] == head; ++b) {
            const std::int32_t *tail = dry.tail_tokens + dry.tails[b], *end = dry.tail_tokens + dry.tails[b + 1];
            if (end - tail <= i && std::equal(tail, end, tokens + n - i)) longest = end - tail;
        }
        if (longest >= 0) return i - longest;
    }
    return n;
}

// Finds the matches of the sequence's end with the Z algorithm, so the work is linear in the window. vocab: of x.
inline void penalise_repetition(const DrySettings& dry, i64 position, i64 vocab, DryScratch& scratch, float* x) {
    const i64 n = std::min(position, dry.window);
    const std::int32_t* tokens = dry.tokens + position - n;
    const i64 limit = length_since_breaker(dry, tokens, n);
    if (limit < dry.allowed_length) return;
    scratch.matches.assign(n, 0);
    scratch.longest.resize(vocab);
    const auto back = [&](i64 i) { return tokens[n - 1 - i]; };
    i64 first = 0, end = 0;  // of the match that reaches furthest back
    for (i64 k = 1; k < n; ++k) {
        i64& match = scratch.matches[k];
        if (k < end) match = std::min(end - k, scratch.matches[k - first]);
        while (k + match < n && back(match) == back(k + match)) ++match;
        if (k + match > end) first = k, end = k + match;
        const i64 length = std::min(match, limit);
        const std::int32_t next = back(k - 1);
        if (length < dry.allowed_length || next < 0) continue;
        if (scratch.longest[next] == 0) scratch.continuing.push_back(next);
        scratch.longest[next] = std::max(scratch.longest[next], 1 + length);
    }
    const i64 highest = dry.base > 1.000001
                            ? i64(std::log(std::numeric_limits<float>::max()) / std::log(dry.base))
                            : std::numeric_limits<i64>::max();
    for (const std::int32_t token : scratch.continuing) {
        const i64 power = std::min(std::exchange(scratch.longest[token], 0) - 1 - dry.allowed_length, highest);
        const i64 b = breakers_of(dry, token) - dry.heads;
        if (b < dry.num_breakers && dry.tails[b] == dry.tails[b + 1]) continue;  // alone a breaker
        x[token] -= float(std::min<double>(dry.multiplier * std::pow(dry.base, double(power)), kMaxDryPenalty));
    }
    scratch.continuing.clear();
}

}  // namespace

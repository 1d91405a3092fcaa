// The key down to which tokens must be kept to have a given part of all weight, without a sort of all tokens.

#pragma once

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "step/operations.h"

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr i64 kFewKeys = 256;     // that are sorted; among more, the range of keys is narrowed first
constexpr i64 kSample = 512;      // keys from which the first range is guessed
constexpr int kSplits = 4;        // keys that are tried in one pass
constexpr i64 kMassBlock = 1024;  // weights that are added up in fp32

using KeyWeight = std::pair<float, float>;

inline Floats load_row(const float* x, i64 count) {
    return count >= 16 ? load(x) : select(lanes_between(0, count), load(x, count), broadcast(kNothing));
}

// Sorts by key, the largest first. Returns the key at which `before` and the running sum of weights reach mass, or the
// last.
inline float first_to_reach(std::vector<KeyWeight>& pairs, double before, double mass) {
    std::sort(pairs.begin(), pairs.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [key, weight] : pairs)
        if ((before += weight) >= mass) return key;
    return pairs.back().first;
}

// The weight and the number of the keys at or above each of the splits.
struct Above {
    double mass[kSplits] = {};
    double count[kSplits] = {};

    Above(const float* keys, const float* weights, i64 n, const float (&splits)[kSplits]) {
        for (i64 first = 0; first < n; first += kMassBlock) {
            Floats part[kSplits], ones[kSplits];
            for (int s = 0; s < kSplits; ++s) part[s] = ones[s] = broadcast(0.0f);
            const i64 end = std::min(n, first + kMassBlock);
            for (i64 i = first; i < end; i += 16) {
                const Floats key = load_row(keys + i, end - i), weight = load(weights + i);
                for (int s = 0; s < kSplits; ++s) {
                    const Mask is_below = less_than(key, broadcast(splits[s]));
                    part[s] = add(part[s], select(is_below, broadcast(0.0f), weight));
                    ones[s] = add(ones[s], select(is_below, broadcast(0.0f), broadcast(1.0f)));
                }
            }
            for (int s = 0; s < kSplits; ++s) mass[s] += sum(part[s]), count[s] += sum(ones[s]);
        }
    }
};

// What is known of the key that is sought: the keys from `low` on reach the mass; those above `high`, which weigh `above`,
// do not.
struct KeyRange {
    float low = kNothing;
    float high = -kNothing;
    double above = 0.0;
    double num_inside = 0.0;  // keys, without a weight too

    // Tries the splits, which ascend. The keys are at most those that the range was known for before, and all of them
    // that are inside; others weigh `others`.
    void narrow(const float* keys, const float* weights, i64 n, double others, double mass, const float (&splits)[kSplits]) {
        const Above from(keys, weights, n, splits);
        int last = kSplits - 1;  // the highest split from which on the keys reach mass
        while (last >= 0 && others + from.mass[last] < mass) --last;
        num_inside = last < 0 ? double(n) : from.count[last];
        if (last + 1 < kSplits) {
            high = std::nextafter(splits[last + 1], kNothing), above = others + from.mass[last + 1];
            num_inside -= from.count[last + 1];
        }
        if (last >= 0) low = splits[last];
    }
};

struct MassScratch {
    std::vector<KeyWeight> pairs;
    std::vector<float> keys, weights;
};

// Takes the keys from low to high that have a weight.
inline void take_inside(const KeyRange& range, const float* keys, const float* weights, i64 n, std::vector<KeyWeight>& pairs) {
    pairs.clear();
    for (i64 i = 0; i < n; i += 16) {
        const Floats key = load_row(keys + i, n - i);
        const Floats weight = select(less_than(broadcast(range.high), key), broadcast(0.0f), load(weights + i));
        const Mask counts = less_than(broadcast(0.0f), select(less_than(key, broadcast(range.low)), broadcast(0.0f), weight));
        for (std::uint32_t lanes = bits_of(counts); lanes; lanes &= lanes - 1) {
            const i64 k = i + __builtin_ctz(lanes);
            pairs.emplace_back(keys[k], weights[k]);
        }
    }
}

// Keys near the one at which the keys of a sample reach the same share of its weight.
inline void split_by_sample(const float* keys, const float* weights, i64 n, double share, std::vector<KeyWeight>& sample,
                            float (&splits)[kSplits]) {
    sample.clear();
    double total = 0.0;
    for (i64 i = 0; i < kSample; ++i) {
        const i64 place = i * n / kSample;
        if (weights[place] > 0.0f) sample.emplace_back(keys[place], weights[place]), total += weights[place];
    }
    if (sample.empty()) sample.emplace_back(keys[0], 0.0f);
    const float key = first_to_reach(sample, 0.0, share * total);
    i64 rank = 0;
    while (sample[rank].first > key) ++rank;
    constexpr i64 kDistances[kSplits] = {32, 8, -8, -32};
    for (int s = 0; s < kSplits; ++s)
        splits[s] = sample[std::clamp<i64>(rank + kDistances[s], 0, i64(sample.size()) - 1)].first;
}

// The largest key such that the weights of all keys from it on reach mass, which is at most the sum of all, `total`. Tokens
// whose weight is 0 do not count. weights must be readable up to a whole vector, with zeros.
inline float key_of_mass(const float* keys, const float* weights, i64 n, double mass, double total, MassScratch& scratch) {
    KeyRange range;
    range.num_inside = double(n);
    float splits[kSplits];
    if (n > 16 * kFewKeys) {
        split_by_sample(keys, weights, n, mass / total, scratch.pairs, splits);
        range.narrow(keys, weights, n, 0.0, mass, splits);
    }
    take_inside(range, keys, weights, n, scratch.pairs);
    const i64 size = i64(scratch.pairs.size());
    if (size == 0) return range.low;
    scratch.keys.resize(size), scratch.weights.assign(size + 16, 0.0f);
    float least = scratch.pairs[0].first, most = least;
    for (i64 i = 0; i < size; ++i) {
        std::tie(scratch.keys[i], scratch.weights[i]) = scratch.pairs[i];
        least = std::min(least, scratch.keys[i]), most = std::max(most, scratch.keys[i]);
    }
    const double others = range.above;
    range.low = least, range.high = most, range.num_inside = double(size);
    while (range.num_inside > kFewKeys) {
        for (int s = 0; s < kSplits; ++s)
            splits[s] = range.low + (range.high - range.low) * (float(s + 1) / (kSplits + 1));
        if (!(range.low < splits[0])) break;  // no number is between them
        range.narrow(scratch.keys.data(), scratch.weights.data(), size, others, mass, splits);
    }
    take_inside(range, scratch.keys.data(), scratch.weights.data(), size, scratch.pairs);
    return scratch.pairs.empty() ? range.low : first_to_reach(scratch.pairs, range.above, mass);
}

}  // namespace

// The key down to which tokens must be kept to have a given part of all weight, without a sort of all tokens.

#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "step/operations.h"

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr i64 kManyCandidates = 1024;  // that are sorted; among more, the range of keys is narrowed first
constexpr int kSplits = 4;             // keys that are tried in one pass
constexpr i64 kMassBlock = 1024;       // weights that are added up in fp32

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

// Takes the keys from low to high that have a weight.
inline void take_pairs(const float* keys, const float* weights, i64 n, float low, float high,
                       std::vector<KeyWeight>& pairs) {
    pairs.clear();
    for (i64 i = 0; i < n; i += 16) {
        const Floats key = load_row(keys + i, n - i);
        const Floats inside = select(less_than(broadcast(high), key), broadcast(kNothing), key);
        if (largest(inside) < low) continue;
        for (i64 k = i; k < std::min(n, i + 16); ++k)
            if (weights[k] > 0.0f && low <= keys[k] && keys[k] <= high) pairs.emplace_back(keys[k], weights[k]);
    }
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

// The largest key such that the weights of all keys from it on reach mass, which is at most the sum of all. Tokens whose
// weight is 0 do not count. weights must be readable up to a whole vector, with zeros.
//
// The keys from `low` on always reach mass; those above `high`, which weigh `above`, do not.
inline float key_of_mass(const float* keys, const float* weights, i64 n, double mass,
                         std::vector<KeyWeight>& pairs) {
    Floats least = broadcast(kNothing), most = least;
    for (i64 i = 0; i < n; i += 16) {
        const Floats key = load_row(keys + i, n - i);
        const Mask counts = less_than(broadcast(0.0f), load(weights + i));
        least = max(least, select(counts, sub(broadcast(0.0f), key), broadcast(kNothing)));
        most = max(most, select(counts, key, broadcast(kNothing)));
    }
    float low = -largest(least), high = largest(most);
    double above = 0.0, num_from_low = double(n), num_above = 0.0;
    for (int step = 0; step < 64 && num_from_low - num_above > kManyCandidates; ++step) {
        float splits[kSplits];
        for (int s = 0; s < kSplits; ++s) splits[s] = low + (high - low) * float(s + 1) / (kSplits + 1);
        if (!(low < splits[0])) break;
        const Above from(keys, weights, n, splits);
        int last = kSplits - 1;  // the highest split from which on the keys reach mass
        while (last >= 0 && from.mass[last] < mass) --last;
        if (last + 1 < kSplits) {
            high = std::nextafter(splits[last + 1], kNothing);
            above = from.mass[last + 1], num_above = from.count[last + 1];
        }
        if (last >= 0) low = splits[last], num_from_low = from.count[last];
    }
    take_pairs(keys, weights, n, low, high, pairs);
    return pairs.empty() ? low : first_to_reach(pairs, above, mass);
}

}  // namespace

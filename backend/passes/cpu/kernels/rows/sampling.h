// Sampling: the token of each row of logits, and its log probabilities.
//
// A row is read once for the largest logit of each block of 64. These maxima bound what a filter keeps: at least k logits
// reach the k-th largest maximum, so top-k and top-p look only into the blocks whose maximum reaches it. Weights are added
// up in a fixed order, so a row's token depends on nothing but its own logits and settings.

#pragma once

#include <cmath>
#include <utility>

#include "scoring.h"

namespace {

constexpr i64 kFewCandidates = 64;        // the nucleus of most rows has fewer tokens
constexpr i64 kManyCandidates = 1024;     // that are sorted; a wider nucleus is found by bisection
constexpr float kMinTemperature = 1e-6f;  // all weight is on the largest logits anyway, and smaller divisors overflow
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The settings of a slot's sequence, and the tokens that its penalties count.
struct SampledSlot {  // mirrored by native_sampling.py
    double top_p;     // 1 keeps all, as typical_p
    double typical_p;
    double min_p;
    std::uint64_t seed;
    i64 top_k;         // 0 keeps all
    i64 num_logprobs;  // -1 for no report
    const std::int32_t* bias_ids;
    const float* biases;
    i64 num_biases;
    std::int32_t* seen_ids;   // each once; has room for another
    std::int32_t* generated;  // how often each was sampled
    i64 num_seen;
    i64 has_penalties;
    float temperature;
    float repetition;
    float frequency;
    float presence;
};

struct SampledRows {  // mirrored by native_sampling.py
    const float* logits;  // [num_rows][vocab]
    SampledSlot* slots;
    const std::int32_t* slot_of_row;
    const i64* positions;        // of the sampled tokens
    const std::uint32_t* masks;  // [masks][mask_words], a bit for each token: whether it is allowed
    const i64* mask_of_row;      // -1 for none; null if no row has one
    i64 mask_words;
    i64 num_rows;
    i64 vocab;
    i64 num_top;            // most likely tokens of each row that reports
    std::int32_t* tokens;   // [num_rows]; -1 if a logit is NaN, or the largest is not finite
    float* chosen;          // [num_rows], as ranks; only of rows that report
    std::int32_t* ranks;
    std::int32_t* top_ids;  // [num_rows][num_top]
    float* top;
};

// A thread's memory for a row.
struct RowScratch {
    std::vector<float> adjusted, block_max, weights, keys, candidates;
    std::vector<double> block_mass;
    std::vector<std::pair<float, float>> sorted;
};

struct SampledRow {
    const float* x;
    i64 n;
    RowScratch& scratch;
    float peak = kNothing;
    float to_log2 = 0.0f;  // factor of (x - peak)

    i64 num_blocks() const { return (n + kScoreBlock - 1) / kScoreBlock; }
    i64 end_of(i64 block) const { return std::min(n, (block + 1) * kScoreBlock); }
};

// A number in [0, 1) with 53 random bits: Philox4x32-10 (Salmon et al., SC 2011).
inline double philox_uniform(std::uint64_t seed, i64 position) {
    std::uint32_t c[4] = {std::uint32_t(position), std::uint32_t(std::uint64_t(position) >> 32), 0, 0};
    std::uint32_t k[2] = {std::uint32_t(seed), std::uint32_t(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t p0 = std::uint64_t(0xD2511F53) * c[0], p1 = std::uint64_t(0xCD9E8D57) * c[2];
        const std::uint32_t next[4] = {std::uint32_t(p1 >> 32) ^ c[1] ^ k[0], std::uint32_t(p1),
                                       std::uint32_t(p0 >> 32) ^ c[3] ^ k[1], std::uint32_t(p0)};
        std::copy(next, next + 4, c);
        k[0] += 0x9E3779B9, k[1] += 0xBB67AE85;
    }
    return double(std::uint64_t(c[0]) << 21 | c[1] >> 11) * 0x1p-53;
}

// Copies the row with the penalties of its slot, then the bias, then the mask. A NaN stays one.
inline void adjust(const float* raw, i64 n, const SampledSlot& slot, const std::uint32_t* mask, std::vector<float>& out) {
    out.assign(raw, raw + n);
    for (i64 i = 0; i < slot.num_seen; ++i) {
        float& x = out[slot.seen_ids[i]];
        const float count = float(slot.generated[i]);
        x = x > 0.0f ? x / slot.repetition : x * slot.repetition;
        x = x - slot.frequency * count - (count > 0.0f ? slot.presence : 0.0f);
    }
    for (i64 i = 0; i < slot.num_biases; ++i) out[slot.bias_ids[i]] += slot.biases[i];
    if (!mask) return;
    for (i64 first = 0; first < n; first += 32) {
        const std::uint32_t allowed = mask[first >> 5];
        if (allowed == 0xffffffff) continue;
        for (i64 i = first; i < std::min(n, first + 32); ++i)
            if (!(allowed >> (i - first) & 1) && out[i] == out[i]) out[i] = kNothing;
    }
}

inline Floats load_row(const float* x, i64 count) {
    return count >= 16 ? load(x) : select(lanes_between(0, count), load(x, count), broadcast(kNothing));
}

// Fills block_max and peak. Returns whether there is no NaN and the peak is finite.
inline bool read_maxima(SampledRow& row) {
    std::vector<float>& maxima = row.scratch.block_max;
    maxima.resize(row.num_blocks());
    row.peak = kNothing;
    Ints bits = zero_ints();
    for (i64 block = 0; block < row.num_blocks(); ++block) {
        Floats most = broadcast(kNothing);
        const i64 end = row.end_of(block);
        for (i64 i = block * kScoreBlock; i < end; i += 16) {
            const Floats x = load_row(row.x + i, end - i);
            most = max(most, x);
            bits = max_bits(bits, x);
        }
        maxima[block] = largest(most);
        row.peak = std::max(row.peak, maxima[block]);
    }
    // As integers, NaNs are the numbers above infinity.
    return largest(bits) <= 0x7f800000 && std::abs(row.peak) < std::numeric_limits<float>::infinity();
}

inline std::int32_t first_largest(const SampledRow& row) {
    i64 block = 0;
    while (row.scratch.block_max[block] != row.peak) ++block;
    i64 i = block * kScoreBlock;
    while (row.x[i] != row.peak) ++i;
    return std::int32_t(i);
}

// Fills candidates with the logits that are at or above floor.
inline void collect(const SampledRow& row, float floor) {
    std::vector<float>& found = row.scratch.candidates;
    found.clear();
    for (i64 block = 0; block < row.num_blocks(); ++block) {
        if (row.scratch.block_max[block] < floor) continue;
        for (i64 i = block * kScoreBlock; i < row.end_of(block); ++i)
            if (row.x[i] >= floor) found.push_back(row.x[i]);
    }
}

// A number that at least `count` logits reach; minus infinity where the blocks are too few to tell.
inline float reached_by(const SampledRow& row, i64 count) {
    if (2 * count > row.num_blocks()) return kNothing;
    std::vector<float>& maxima = row.scratch.keys;
    maxima = row.scratch.block_max;
    std::nth_element(maxima.begin(), maxima.begin() + count - 1, maxima.end(), std::greater<float>());
    return maxima[count - 1];
}

inline float kth_largest(const SampledRow& row, i64 k) {
    collect(row, reached_by(row, k));
    std::vector<float>& found = row.scratch.candidates;
    std::nth_element(found.begin(), found.begin() + k - 1, found.end(), std::greater<float>());
    return found[k - 1];
}

// exp((x - peak) / temperature) of the lanes that are at or above floor, else 0.
inline Floats weights_of(const SampledRow& row, Floats x, float floor) {
    const Floats power = exp2_negative(mul(sub(x, broadcast(row.peak)), broadcast(row.to_log2)));
    return select(less_than(x, broadcast(floor)), broadcast(0.0f), power);
}

// Fills block_mass with the weight of each block's logits at or above floor, and returns the sum of all.
inline double weigh_blocks(const SampledRow& row, float floor) {
    std::vector<double>& mass = row.scratch.block_mass;
    mass.assign(row.num_blocks(), 0.0);
    double total = 0.0;
    for (i64 block = 0; block < row.num_blocks(); ++block) {
        if (row.scratch.block_max[block] < floor) continue;
        Floats part = broadcast(0.0f);
        const i64 end = row.end_of(block);
        for (i64 i = block * kScoreBlock; i < end; i += 16)
            part = add(part, weights_of(row, load_row(row.x + i, end - i), floor));
        mass[block] = sum(part);
        total += mass[block];
    }
    return total;
}

// Fills weights[0 … n), and up to a whole vector with zeros.
inline void weigh_all(const SampledRow& row, const float* x, i64 n, float floor) {
    row.scratch.weights.resize(n + 16);
    for (i64 i = 0; i < n; i += 16) store(row.scratch.weights.data() + i, weights_of(row, load_row(x + i, n - i), floor));
}

// Sorts pairs of key and weight, the largest key first. Returns the key at which `before` and the running sum reach mass,
// or the last.
inline float first_to_reach(std::vector<std::pair<float, float>>& pairs, double before, double mass) {
    std::sort(pairs.begin(), pairs.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [key, weight] : pairs)
        if ((before += weight) >= mass) return key;
    return pairs.back().first;
}

// The pairs of key and weight from low to high that have a weight.
inline void take_pairs(RowScratch& scratch, const float* keys, i64 n, float low, float high) {
    const float* weights = scratch.weights.data();
    scratch.sorted.clear();
    for (i64 i = 0; i < n; i += 16) {
        const Floats key = load_row(keys + i, n - i);
        const Floats inside = select(less_than(broadcast(high), key), broadcast(kNothing), key);
        if (largest(inside) < low) continue;
        for (i64 k = i; k < std::min(n, i + 16); ++k)
            if (weights[k] > 0.0f && low <= keys[k] && keys[k] <= high) scratch.sorted.emplace_back(keys[k], weights[k]);
    }
}

// The largest key such that the weights of all keys from it on reach mass, which is at most the sum of all, `total`. Tokens
// whose weight is 0 do not count.
//
// Steps of bisection and of interpolation in turns. The keys from `low` on, which weigh `from_low`, always reach mass; those
// above `high`, which weigh `above`, do not.
inline float key_of_mass(RowScratch& scratch, const float* keys, i64 n, double mass, double total) {
    const float* weights = scratch.weights.data();
    Floats least = broadcast(kNothing), most = least;
    for (i64 i = 0; i < n; i += 16) {
        const Floats key = load_row(keys + i, n - i);
        const Mask counts = less_than(broadcast(0.0f), load(weights + i));
        least = max(least, select(counts, sub(broadcast(0.0f), key), broadcast(kNothing)));
        most = max(most, select(counts, key, broadcast(kNothing)));
    }
    float low = -largest(least), high = largest(most);
    double above = 0.0, from_low = total;
    i64 inside = n;
    for (int step = 0; step < 64 && inside > kManyCandidates; ++step) {
        const double share = step % 2 ? (from_low - mass) / (from_low - above) : 0.5;
        const float middle = low + (high - low) * float(std::min(std::max(share, 0.01), 0.99));
        if (!(low < middle)) break;
        double from_middle = 0.0, count = 0.0;
        for (i64 first = 0; first < n; first += 16 * kScoreBlock) {
            Floats part = broadcast(0.0f), ones = broadcast(0.0f);
            const i64 end = std::min(n, first + 16 * kScoreBlock);
            for (i64 i = first; i < end; i += 16) {
                const Floats key = load_row(keys + i, end - i);
                const Floats one = select(less_than(key, broadcast(middle)), broadcast(0.0f), broadcast(1.0f));
                part = fmadd(one, load(weights + i), part);
                ones = add(ones, select(less_than(broadcast(high), key), broadcast(0.0f), one));
            }
            from_middle += sum(part);
            count += sum(ones);
        }
        if (from_middle >= mass) low = middle, from_low = from_middle, inside = i64(count);
        else high = std::nextafter(middle, kNothing), above = from_middle, inside -= i64(count);
    }
    take_pairs(scratch, keys, n, low, high);
    return scratch.sorted.empty() ? low : first_to_reach(scratch.sorted, above, mass);
}

// The smallest logit of the nucleus: the largest tokens at or above floor whose weight reaches top_p (arXiv 1904.09751).
inline float nucleus_floor(const SampledRow& row, float floor, double top_p) {
    RowScratch& scratch = row.scratch;
    const double total = weigh_blocks(row, floor), mass = top_p * total;
    for (const i64 count : {kFewCandidates, kManyCandidates}) {
        const float reached = std::max(floor, reached_by(row, count));
        collect(row, reached);
        const i64 size = i64(scratch.candidates.size());
        if (size > 4 * kManyCandidates) break;
        weigh_all(row, scratch.candidates.data(), size, reached);
        scratch.sorted.clear();
        double found = 0.0;
        for (i64 i = 0; i < size; ++i) {
            scratch.sorted.emplace_back(scratch.candidates[i], scratch.weights[i]);
            found += scratch.weights[i];
        }
        if (found >= mass || reached <= floor) return first_to_reach(scratch.sorted, 0.0, mass);
    }
    weigh_all(row, row.x, row.n, floor);
    return key_of_mass(scratch, row.x, row.n, mass, total);
}

// Makes tokens that are not locally typical minus infinity (arXiv 2202.00666): kept are those whose surprise is nearest to
// the distribution's entropy, until their mass reaches typical_p.
inline void keep_typical(SampledRow& row, float floor, double typical_p) {
    weigh_all(row, row.x, row.n, floor);
    std::vector<float>&weights = row.scratch.weights, &keys = row.scratch.keys, &kept = row.scratch.adjusted;
    double total = 0.0, entropy = 0.0;
    for (i64 i = 0; i < row.n; ++i) total += weights[i];
    for (i64 i = 0; i < row.n; ++i)
        if (weights[i] > 0.0f) entropy -= weights[i] / total * std::log(weights[i] / total);
    keys.resize(row.n);
    for (i64 i = 0; i < row.n; ++i)
        keys[i] = weights[i] > 0.0f ? -float(std::abs(std::log(weights[i] / total) + entropy)) : kNothing;
    const float least = key_of_mass(row.scratch, keys.data(), row.n, typical_p * total, total);
    if (row.x != kept.data()) kept.assign(row.x, row.x + row.n), row.x = kept.data();
    for (i64 i = 0; i < row.n; ++i)
        if (keys[i] < least) kept[i] = kNothing;
}

// The first token at which the running sum of weights exceeds uniform × their sum.
inline std::int32_t token_at(const SampledRow& row, float floor, double uniform) {
    const double target = uniform * weigh_blocks(row, floor);
    const std::vector<double>& mass = row.scratch.block_mass;
    double before = 0.0;
    i64 block = -1;
    for (i64 next = 0; next < row.num_blocks() && before <= target; ++next)
        if (mass[next] > 0.0) block = next, before += mass[next];
    before -= mass[block];
    i64 token = block * kScoreBlock;
    for (i64 first = token; first < row.end_of(block); first += 16) {
        const i64 count = std::min<i64>(16, row.end_of(block) - first);
        float weights[16];
        store(weights, weights_of(row, load_row(row.x + first, count), floor));
        for (i64 i = 0; i < count; ++i) {
            if (weights[i] == 0.0f) continue;
            token = first + i;
            if ((before += weights[i]) > target) return std::int32_t(token);
        }
    }
    return std::int32_t(token);  // rounding put the target just above the block's own running sum
}

// Top-k, typical-p, top-p and min-p, in this order.
inline std::int32_t draw(SampledRow& row, const SampledSlot& slot, double uniform) {
    const float temperature = std::max(slot.temperature, kMinTemperature);
    row.to_log2 = kLog2E / temperature;
    const float least = row.peak + temperature * float(std::log(slot.min_p));
    float floor = kNothing;
    if (slot.top_k > 0 && slot.top_k < row.n) floor = kth_largest(row, slot.top_k);
    if (slot.typical_p < 1.0) {
        keep_typical(row, floor, slot.typical_p);
        read_maxima(row);
    }
    if (slot.top_p < 1.0) floor = nucleus_floor(row, floor, slot.top_p);
    // typical_p may have dropped the peak that min_p refers to: the likeliest token that is left always stays.
    return token_at(row, std::min(std::max(floor, least), row.peak), uniform);
}

inline void count_token(SampledSlot& slot, std::int32_t token) {
    i64 place = 0;
    while (place < slot.num_seen && slot.seen_ids[place] != token) ++place;
    if (place == slot.num_seen) slot.seen_ids[place] = token, slot.generated[place] = 0, ++slot.num_seen;
    ++slot.generated[place];
}

inline void sample_row(const SampledRows& rows, i64 r) {
    static thread_local RowScratch scratch;
    SampledSlot& slot = rows.slots[rows.slot_of_row[r]];
    const float* raw = rows.logits + r * rows.vocab;
    const i64 mask = rows.mask_of_row ? rows.mask_of_row[r] : -1;
    SampledRow row{raw, rows.vocab, scratch};
    if (slot.has_penalties || slot.num_biases || mask >= 0) {
        adjust(raw, rows.vocab, slot, mask < 0 ? nullptr : rows.masks + mask * rows.mask_words, scratch.adjusted);
        row.x = scratch.adjusted.data();
    }
    if (!read_maxima(row)) {
        rows.tokens[r] = -1;
        return;
    }
    const bool is_random = slot.temperature > 0.0f;
    const std::int32_t token = is_random ? draw(row, slot, philox_uniform(slot.seed, rows.positions[r])) : first_largest(row);
    rows.tokens[r] = token;
    if (slot.has_penalties) count_token(slot, token);
    if (slot.num_logprobs < 0) return;
    score_token(raw, rows.vocab, token, rows.num_top, rows.chosen[r], rows.ranks[r], rows.top + r * rows.num_top,
                rows.top_ids + r * rows.num_top);
}

inline void sample(Engine& engine, const SampledRows& rows) {
    engine.pool.run(rows.num_rows, [&](i64 r, int) { sample_row(rows, r); });
}

}  // namespace

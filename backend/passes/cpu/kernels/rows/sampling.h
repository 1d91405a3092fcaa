// Sampling: the token of each row of logits, and its log probabilities.
//
// A row is read once for the largest logit of each block of 64. These maxima bound what a filter keeps: at least k logits
// reach the k-th largest maximum, so top-k and top-p look only into the blocks whose maximum reaches it. Weights are added
// up in a fixed order, so a row's token depends on nothing but its own logits and settings.

#pragma once

#include <cmath>
#include <utility>

#include "mass_floor.h"
#include "random.h"
#include "repetition.h"
#include "scoring.h"

namespace {

constexpr i64 kFewCandidates = 64;        // the nucleus of most rows has fewer tokens
constexpr i64 kManyCandidates = 1024;     // that are sorted
constexpr float kMinTemperature = 1e-6f;  // all weight is on the largest logits anyway, and smaller divisors overflow

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
    const DrySettings* dry;  // null if it is off
    double xtc_probability;
    double xtc_threshold;
    double top_n_sigma;     // 0 keeps all
    double dynatemp_range;  // 0 is off
    double dynatemp_exponent;
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
    std::vector<KeyWeight> sorted;
    MassScratch mass;
    DryScratch dry;
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

// Copies the row with the penalties of its slot, then the bias, then the mask. A NaN stays one.
inline void adjust(const float* raw, i64 n, const SampledSlot& slot, i64 position, const std::uint32_t* mask,
                   RowScratch& scratch) {
    std::vector<float>& out = scratch.adjusted;
    out.assign(raw, raw + n);
    for (i64 i = 0; i < slot.num_seen; ++i) {
        float& x = out[slot.seen_ids[i]];
        const float count = float(slot.generated[i]);
        x = x > 0.0f ? x / slot.repetition : x * slot.repetition;
        x = x - slot.frequency * count - (count > 0.0f ? slot.presence : 0.0f);
    }
    if (slot.dry) penalise_repetition(*slot.dry, position, n, scratch.dry, out.data());
    for (i64 i = 0; i < slot.num_biases; ++i) out[slot.bias_ids[i]] += slot.biases[i];
    if (!mask) return;
    for (i64 first = 0; first < n; first += 32) {
        const std::uint32_t allowed = mask[first >> 5];
        if (allowed == 0xffffffff) continue;
        for (i64 i = first; i < std::min(n, first + 32); ++i)
            if (!(allowed >> (i - first) & 1) && out[i] == out[i]) out[i] = kNothing;
    }
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

// Fills candidates with the logits that are at or above floor. Returns false, before it has all, if there are too many.
inline bool collect(const SampledRow& row, float floor, i64 limit) {
    std::vector<float>& found = row.scratch.candidates;
    found.clear();
    for (i64 block = 0; block < row.num_blocks(); ++block) {
        if (row.scratch.block_max[block] < floor) continue;
        for (i64 i = block * kScoreBlock; i < row.end_of(block); ++i)
            if (row.x[i] >= floor) found.push_back(row.x[i]);
        if (i64(found.size()) > limit) return false;
    }
    return true;
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
    collect(row, reached_by(row, k), row.n);
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

// The smallest logit of the nucleus: the largest tokens at or above floor whose weight reaches top_p (arXiv 1904.09751).
inline float nucleus_floor(const SampledRow& row, float floor, double top_p) {
    RowScratch& scratch = row.scratch;
    const double total = weigh_blocks(row, floor), mass = top_p * total;
    for (const i64 count : {kFewCandidates, kManyCandidates}) {
        const float reached = std::max(floor, reached_by(row, count));
        if (!collect(row, reached, 4 * kManyCandidates)) break;
        const i64 size = i64(scratch.candidates.size());
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
    return key_of_mass(row.x, scratch.weights.data(), row.n, mass, total, scratch.mass);
}

// Makes the row one that may be changed.
inline void own_row(SampledRow& row) {
    std::vector<float>& own = row.scratch.adjusted;
    if (row.x != own.data()) own.assign(row.x, row.x + row.n), row.x = own.data();
}

// Makes tokens that are not locally typical minus infinity (arXiv 2202.00666): kept are those whose surprise is nearest to
// the distribution's entropy, until their mass reaches typical_p.
inline void keep_typical(SampledRow& row, float floor, double typical_p) {
    weigh_all(row, row.x, row.n, floor);
    std::vector<float>&weights = row.scratch.weights, &keys = row.scratch.keys;
    double total = 0.0, entropy = 0.0;
    for (i64 i = 0; i < row.n; ++i) total += weights[i];
    for (i64 i = 0; i < row.n; ++i)
        if (weights[i] > 0.0f) entropy -= weights[i] / total * std::log(weights[i] / total);
    keys.resize(row.n);
    for (i64 i = 0; i < row.n; ++i)
        keys[i] = weights[i] > 0.0f ? -float(std::abs(std::log(weights[i] / total) + entropy)) : kNothing;
    const float least = key_of_mass(keys.data(), weights.data(), row.n, typical_p * total, total, row.scratch.mass);
    own_row(row);
    for (i64 i = 0; i < row.n; ++i)
        if (keys[i] < least) row.scratch.adjusted[i] = kNothing;
    read_maxima(row);
}

// Calls visit(x, floor <= x as ones and zeros) for each vector of logits, and block_done() after each block.
template <class Visit, class Done>
inline void for_kept(const SampledRow& row, float floor, Visit visit, Done block_done) {
    const float least = std::max(floor, -std::numeric_limits<float>::max());
    for (i64 block = 0; block < row.num_blocks(); ++block) {
        if (row.scratch.block_max[block] < least) continue;
        const i64 end = row.end_of(block);
        for (i64 i = block * kScoreBlock; i < end; i += 16) {
            const Floats x = load_row(row.x + i, end - i);
            const Mask dropped = less_than(x, broadcast(least));
            visit(select(dropped, broadcast(row.peak), x), select(dropped, broadcast(0.0f), broadcast(1.0f)));
        }
        block_done();
    }
}

// peak - num_sigmas standard deviations of the logits that are not minus infinity (top-n-sigma, arXiv 2411.07641).
inline float sigma_floor(const SampledRow& row, double num_sigmas) {
    double total = 0.0, count = 0.0, squares = 0.0;
    Floats part = broadcast(0.0f), ones = part;
    for_kept(
        row, kNothing,
        [&](Floats x, Floats one) { part = add(part, sub(x, broadcast(row.peak))), ones = add(ones, one); },
        [&] { total += sum(part), count += sum(ones), part = ones = broadcast(0.0f); });
    const Floats mean = broadcast(row.peak + float(total / count));
    for_kept(
        row, kNothing,
        [&](Floats x, Floats one) { part = fmadd(mul(sub(x, mean), one), sub(x, mean), part); },
        [&] { squares += sum(part), part = broadcast(0.0f); });
    return row.peak - float(num_sigmas * std::sqrt(squares / count));
}

// XTC: drops all but the least likely of the tokens whose probability among those at or above floor reaches threshold.
// Those that tie with it stay.
inline void exclude_top(SampledRow& row, float floor, double threshold) {
    const float reached = row.peak + float(std::log(threshold * weigh_blocks(row, floor)));
    collect(row, std::max({floor, reached, -std::numeric_limits<float>::max()}), row.n);
    const std::vector<float>& found = row.scratch.candidates;
    if (found.size() < 2) return;
    const float least = *std::min_element(found.begin(), found.end());
    own_row(row);
    for (float& x : row.scratch.adjusted)
        if (x > least) x = kNothing;
    read_maxima(row);
}

// The temperature within dynatemp_range of the slot's, by the entropy of the tokens at or above floor.
inline float dynamic_temperature(const SampledRow& row, float floor, const SampledSlot& slot) {
    double total = 0.0, count = 0.0, moment = 0.0;
    Floats mass = broadcast(0.0f), ones = mass, part = mass;
    for_kept(
        row, floor,
        [&](Floats x, Floats one) {
            const Floats weight = mul(one, weights_of(row, x, kNothing));
            mass = add(mass, weight), ones = add(ones, one);
            part = fmadd(weight, sub(x, broadcast(row.peak)), part);
        },
        [&] {
            total += sum(mass), count += sum(ones), moment += sum(part);
            mass = ones = part = broadcast(0.0f);
        });
    if (count < 2.0) return slot.temperature;
    const double entropy = std::max(0.0, std::log(total) - moment / total) / std::log(count);
    const double lowest = std::max(0.0, slot.temperature - slot.dynatemp_range);
    const double highest = slot.temperature + slot.dynatemp_range;
    return float(lowest + (highest - lowest) * std::pow(entropy, slot.dynatemp_exponent));
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

// Top-n-sigma, top-k, typical-p, top-p and min-p, in this order. With XTC or a dynamic temperature the order is
// llama.cpp's: filters see the distribution at temperature 1, and the temperature comes last.
inline std::int32_t draw(SampledRow& row, const SampledSlot& slot, i64 position) {
    const bool is_tempered_last = slot.xtc_probability > 0.0 || slot.dynatemp_range > 0.0;
    const float temperature = is_tempered_last ? 1.0f : std::max(slot.temperature, kMinTemperature);
    row.to_log2 = kLog2E / temperature;
    const float least = row.peak + temperature * float(std::log(slot.min_p));
    float floor = slot.top_n_sigma > 0.0 ? sigma_floor(row, slot.top_n_sigma) : kNothing;
    if (slot.top_k > 0 && slot.top_k < row.n) floor = std::max(floor, kth_largest(row, slot.top_k));
    if (slot.typical_p < 1.0) keep_typical(row, floor, slot.typical_p);
    if (slot.top_p < 1.0) floor = nucleus_floor(row, floor, slot.top_p);
    // typical_p may have dropped the peak that min_p refers to: the likeliest token that is left always stays.
    floor = std::min(std::max(floor, least), row.peak);
    if (is_tempered_last) {
        if (philox_uniform(slot.seed, position, kExclusionStream) < slot.xtc_probability)
            exclude_top(row, floor, slot.xtc_threshold);
        const float last = slot.dynatemp_range > 0.0 ? dynamic_temperature(row, floor, slot) : slot.temperature;
        row.to_log2 = kLog2E / std::max(last, kMinTemperature);
    }
    return token_at(row, floor, philox_uniform(slot.seed, position, kTokenStream));
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
    const i64 position = rows.positions[r];
    if (slot.has_penalties || slot.num_biases || slot.dry || mask >= 0) {
        adjust(raw, rows.vocab, slot, position, mask < 0 ? nullptr : rows.masks + mask * rows.mask_words, scratch);
        row.x = scratch.adjusted.data();
    }
    if (!read_maxima(row)) {
        rows.tokens[r] = -1;
        return;
    }
    const std::int32_t token = slot.temperature > 0.0f ? draw(row, slot, position) : first_largest(row);
    rows.tokens[r] = token;
    if (slot.has_penalties) count_token(slot, token);
    if (slot.dry) slot.dry->tokens[position] = token;
    if (slot.num_logprobs < 0) return;
    score_token(raw, rows.vocab, token, rows.num_top, rows.chosen[r], rows.ranks[r], rows.top + r * rows.num_top,
                rows.top_ids + r * rows.num_top);
}

inline void sample(Engine& engine, const SampledRows& rows) {
    engine.pool.run(rows.num_rows, [&](i64 r, int) { sample_row(rows, r); });
}

}  // namespace

// Mixtures of experts, except their products: which experts a token uses, the pairs of a token and an expert grouped by
// expert, clamped gates, and the weighted sum of a token's results. A pair's number is token * per_token + rank; its place is its
// position in the groups, which lie one after the other.

#include "common/reduce.cuh"
#include "common/values.cuh"

constexpr int kRouteThreads = 128;  // a warp per token
constexpr int kGroupThreads = 256;
constexpr int kRowThreads = 128;

// Whether (value, expert) comes before the other pair: larger values first, of equal ones the lower expert.
__device__ __forceinline__ bool comes_before(float value, int expert, float other_value, int other_expert) {
    return value > other_value || (value == other_value && expert < other_expert);
}

// The likeliest experts of each token, and their probabilities among all experts, divided by their sum if `normalises`.
// logits [num_tokens, num_experts] fp32; chosen and weights [num_tokens, per_token], likeliest first, per_token at most
// num_experts. A NaN among a token's logits makes its weights NaN. Blocks: x tokens, one per warp.
extern "C" __global__ void __launch_bounds__(kRouteThreads, 4)
    route(const float* __restrict__ logits, int* __restrict__ chosen, float* __restrict__ weights, int num_tokens,
          int num_experts, int per_token, int normalises) {
    const int token = blockIdx.x * (kRouteThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= num_tokens) return;
    const float* row = logits + (long long)(token) * num_experts;
    float peak = -infinity(), sum = 0.0f;
    for (int expert = lane; expert < num_experts; expert += 32) peak = fmaxf(peak, row[expert]);
    peak = reduce_lanes(peak, 32, Largest{});
    for (int expert = lane; expert < num_experts; expert += 32) sum += expf(row[expert] - peak);
    sum = reduce_lanes(sum, 32, Sum{});

    int* my_chosen = chosen + (long long)(token) * per_token;
    float* my_weights = weights + (long long)(token) * per_token;
    float last = infinity(), total = 0.0f;
    int last_expert = -1;
    for (int rank = 0; rank < per_token; ++rank) {
        float best = -infinity();
        int best_expert = num_experts;
        for (int expert = lane; expert < num_experts; expert += 32) {
            const float value = row[expert] == row[expert] ? row[expert] : -infinity();
            const bool is_left = comes_before(last, last_expert, value, expert);
            if (is_left && comes_before(value, expert, best, best_expert)) best = value, best_expert = expert;
        }
        for (int step = 16; step > 0; step /= 2) {
            const float other = __shfl_xor_sync(kWholeWarp, best, step);
            const int other_expert = __shfl_xor_sync(kWholeWarp, best_expert, step);
            if (comes_before(other, other_expert, best, best_expert)) best = other, best_expert = other_expert;
        }
        last = best, last_expert = best_expert;
        const float probability = expf(best - peak) / sum;
        total += probability;
        if (lane == 0) my_chosen[rank] = best_expert, my_weights[rank] = probability;
    }
    if (lane != 0 || !normalises) return;
    for (int rank = 0; rank < per_token; ++rank) my_weights[rank] /= total;
}

// Group the pairs by expert, in the order of their numbers within a group. chosen and places [num_pairs]; tokens
// [num_pairs]: the token of the pair at each place; ends [experts]: where each group ends. Blocks: x experts.
extern "C" __global__ void __launch_bounds__(kGroupThreads, 4)
    group_pairs(const int* __restrict__ chosen, int* __restrict__ places, int* __restrict__ tokens,
                int* __restrict__ ends, int num_pairs, int per_token) {
    constexpr int kWarps = kGroupThreads / 32;
    __shared__ int counts[kWarps], counts_before[kWarps];
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Each warp has a part of the pairs, whole groups of 32.
    const int part = (num_pairs + kGroupThreads - 1) / kGroupThreads * 32;
    const int begin = warp * part, end = min(num_pairs, begin + part);
    int count = 0, count_before = 0;
    for (int first = begin; first < end; first += 32) {
        const int pair = first + lane, found = pair < end ? chosen[pair] : expert + 1;
        count += __popc(__ballot_sync(kWholeWarp, found == expert));
        count_before += __popc(__ballot_sync(kWholeWarp, found < expert));
    }
    if (lane == 0) counts[warp] = count, counts_before[warp] = count_before;
    __syncthreads();
    int place = 0, group_end = 0;
    for (int i = 0; i < kWarps; ++i) {
        group_end += counts_before[i] + counts[i];
        place += counts_before[i] + (i < warp ? counts[i] : 0);
    }
    if (threadIdx.x == 0) ends[expert] = group_end;
    for (int first = begin; first < end; first += 32) {
        const int pair = first + lane;
        const bool is_mine = pair < end && chosen[pair] == expert;
        const unsigned mine = __ballot_sync(kWholeWarp, is_mine);
        if (is_mine) {
            const int my_place = place + __popc(mine & ((1u << lane) - 1));
            places[pair] = my_place;
            tokens[my_place] = pair / per_token;
        }
        place += __popc(mine);
    }
}

// out [pairs, size] = gate * sigmoid(alpha * gate) * (up + 1), with gate at most limit and up from -limit to limit. gate
// and up: gate_up [pairs, 2 * size], [gate | up] in each row, plus the expert's row of bias [num_experts, 2 * size].
// gate_up and out by place; places and chosen [pairs]. Blocks: x pairs, y chunks of 8 numbers, one per thread.
extern "C" __global__ void __launch_bounds__(kRowThreads, 8)
    clamped_gate(const Act* __restrict__ gate_up, const int* __restrict__ places, const int* __restrict__ chosen,
                 const float* __restrict__ bias, Act* __restrict__ out, int size, float alpha, float limit) {
    const int column = (blockIdx.y * kRowThreads + threadIdx.x) * 8;
    if (column >= size) return;
    const long long place = places[blockIdx.x], expert = chosen[blockIdx.x];
    float gates[8], ups[8], gate_biases[8], up_biases[8];
    load8(gate_up + place * 2 * size + column, gates);
    load8(gate_up + place * 2 * size + size + column, ups);
    load8(bias + expert * 2 * size + column, gate_biases);
    load8(bias + expert * 2 * size + size + column, up_biases);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        // Comparisons with NaN are false, so NaN stays.
        float gate = gates[j] + gate_biases[j], up = ups[j] + up_biases[j];
        if (gate > limit) gate = limit;
        if (up > limit) up = limit;
        if (up < -limit) up = -limit;
        gates[j] = gate / (1.0f + expf(-alpha * gate)) * (up + 1.0f);
    }
    store8(out + place * size + column, gates);
}

// residual [T, hidden] fp32 += scale * the weighted sum of the token's results, likeliest expert first. results [pairs,
// hidden] by place; places, chosen and weights [T, per_token]. If has_bias, a result is added to the expert's row of bias
// [num_experts, hidden]. Blocks: x tokens, y chunks of 8 numbers, one per thread.
extern "C" __global__ void __launch_bounds__(kRowThreads, 8)
    add_expert_results(const Act* __restrict__ results, const int* __restrict__ places,
                       const int* __restrict__ chosen, const float* __restrict__ weights,
                       const float* __restrict__ bias, float* __restrict__ residual, int hidden, int per_token,
                       int has_bias, float scale) {
    const int column = (blockIdx.y * kRowThreads + threadIdx.x) * 8;
    if (column >= hidden) return;
    const long long first = (long long)(blockIdx.x) * per_token;
    float sum[8] = {};
    for (int rank = 0; rank < per_token; ++rank) {
        float x[8];
        load8(results + (long long)(places[first + rank]) * hidden + column, x);
        if (has_bias) {
            float of_expert[8];
            load8(bias + (long long)(chosen[first + rank]) * hidden + column, of_expert);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] += of_expert[j];
        }
        const float weight = weights[first + rank];
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += x[j] * weight;
    }
    float* at = residual + (long long)(blockIdx.x) * hidden + column;
    float y[8];
    load8(at, y);
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] += sum[j] * scale;
    store8(at, y);
}

// mixed [T, width] *= sigmoid(x [T, hidden] · gate [hidden]), in place. Blocks: x tokens.
extern "C" __global__ void __launch_bounds__(kRowThreads, 8)
    weight_by_sigmoid(const Act* __restrict__ x, const Act* __restrict__ gate, Act* __restrict__ mixed, int hidden,
                      int width) {
    __shared__ float one_per_warp[kMaxWarps];
    const Act* row = x + (long long)(blockIdx.x) * hidden;
    float dot = 0.0f, a[8], b[8];
    for (int column = threadIdx.x * 8; column < hidden; column += kRowThreads * 8) {
        load8(row + column, a);
        load8(gate + column, b);
#pragma unroll
        for (int j = 0; j < 8; ++j) dot += a[j] * b[j];
    }
    const float weight = 1.0f / (1.0f + expf(-reduce_block(dot, one_per_warp, Sum{})));
    Act* mine = mixed + (long long)(blockIdx.x) * width;
    for (int column = threadIdx.x * 8; column < width; column += kRowThreads * 8) {
        load8(mine + column, a);
#pragma unroll
        for (int j = 0; j < 8; ++j) a[j] *= weight;
        store8(mine + column, a);
    }
}

// Products with weights of 4 or 8 bits, which become 16-bit numbers in registers, and what else reads such weights.

#include "products/expert_tiles.cuh"
#include "products/quantised_weights.cuh"
#include "step/step_tokens.cuh"

constexpr int kRowThreads = 128;

// With one scale for each output a sum of products lacks the scale of its output.
__device__ __forceinline__ float scale_of(const PackedWeights& weights, long long output) {
#if GROUP || BLOCKS
    return 1.0f;
#else
    return weights.scales[output];
#endif
}

// As multiply_experts, with weights [num_experts * outputs, inputs]; the results are scale * (x · weights + bias), with
// bias [num_experts * outputs] if has_bias. A plain linear is one expert, which has all rows.
extern "C" __global__ void __launch_bounds__(kProductThreads, 2)
    multiply_quantised(const Act* __restrict__ x, const int* __restrict__ tokens,
                       const unsigned char* __restrict__ values, const Scale* __restrict__ scales,
                       const unsigned char* __restrict__ zeros, const Act* __restrict__ bias,
                       const int* __restrict__ ends, Act* __restrict__ out, int num_experts, int outputs, int inputs,
                       int gathers, int has_bias, float scale, int blocks) {
    const GroupTile tile = find_tile(ends, num_experts, blockIdx.y);
    if (tile.num_rows == 0) return;
    __shared__ __align__(16) TileSums sums;
    const int first_output = blockIdx.x * kTileOutputs;
    const long long before = (long long)(tile.expert) * outputs;
    const PackedWeights packed{values, scales, zeros, inputs, blocks};
    QuantisedWeights weights(packed, {first_output, outputs, 0}, before);
    const auto source = [&](int row) { return gathers ? tokens[tile.first + row] : tile.first + row; };
    multiply_tile(sums, x, weights, source, tile.num_rows, inputs);
    __syncthreads();
    const auto finish = [&](float sum, int output) {
        const float product = sum * scale_of(packed, before + output);
        return (has_bias ? product + to_float(bias[before + output]) : product) * scale;
    };
    store_tile(sums, out + (long long)(tile.first) * outputs, first_output, outputs, tile.num_rows, finish);
}

// out [n, inputs] = the weights of outputs `first` and up. inputs: a multiple of 8. Blocks: x outputs, y chunks of 8
// inputs, one per thread.
extern "C" __global__ void __launch_bounds__(kRowThreads, 8)
    dequantise_rows(const unsigned char* __restrict__ values, const Scale* __restrict__ scales,
                    const unsigned char* __restrict__ zeros, Act* __restrict__ out, int first, int inputs,
                    int blocks) {
    const int column = (blockIdx.y * kRowThreads + threadIdx.x) * 8;
    if (column >= inputs) return;
    float x[8];
    dequantise8(PackedWeights{values, scales, zeros, inputs, blocks}, first + (long long)(blockIdx.x), column, x);
    store8(out + (long long)(blockIdx.x) * inputs + column, x);
}

// As `embed`, with a table [vocab_size, hidden] of quantised weights.
extern "C" __global__ void __launch_bounds__(kRowThreads, 8)
    embed_quantised(const unsigned char* __restrict__ values, const Scale* __restrict__ scales,
                    const unsigned char* __restrict__ zeros, const int* __restrict__ input_ids,
                    const int* __restrict__ last_tokens, const int* __restrict__ query_starts,
                    const int* __restrict__ slots, float* __restrict__ residual, int num_rows, int vocab_size,
                    int hidden, float scale, int blocks) {
    const int column = (blockIdx.y * kRowThreads + threadIdx.x) * 8;
    if (column >= hidden) return;
    const int token_id = token_to_embed(blockIdx.x, input_ids, last_tokens, query_starts, slots, num_rows);
    if (token_id == kFromEmbeddings) return;
    float x[8] = {};
    if (token_id >= 0 && token_id < vocab_size)
        dequantise8(PackedWeights{values, scales, zeros, hidden, blocks}, token_id, column, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= scale;
    store8(residual + (long long)(blockIdx.x) * hidden + column, x);
}

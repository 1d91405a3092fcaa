// The products of experts: rows that are grouped by expert, each times the weight of its own.

#include "products/expert_tiles.cuh"

// out [pairs, outputs]: the pair at each place times the weight of its expert. weight [num_experts, outputs, inputs];
// inputs and outputs: multiples of 8. x [tokens, inputs] and tokens [pairs] if `gathers`, else x [pairs, inputs].
// Blocks: x tiles of kTileOutputs outputs, y at least as many as there are tiles of rows.
extern "C" __global__ void __launch_bounds__(kProductThreads, 2)
    multiply_experts(const Act* __restrict__ x, const int* __restrict__ tokens, const Act* __restrict__ weight,
                     const int* __restrict__ ends, Act* __restrict__ out, int num_experts, int outputs, int inputs,
                     int gathers) {
    const GroupTile tile = find_tile(ends, num_experts, blockIdx.y);
    if (tile.num_rows == 0) return;
    const int first_output = blockIdx.x * kTileOutputs;
    const Act* of_expert = weight + (long long)(tile.expert) * outputs * inputs;
    Act* rows = out + (long long)(tile.first) * outputs;
    const auto source = [&](int row) { return gathers ? tokens[tile.first + row] : tile.first + row; };
#if ACT == 0
    // Plain sums: mma.sync has no product of fp32 numbers that keeps their precision.
    const int output = first_output + threadIdx.x % kTileOutputs;
    if (output >= outputs) return;
    for (int row = threadIdx.x / kTileOutputs; row < tile.num_rows; row += kProductThreads / kTileOutputs) {
        const Act *a = x + (long long)(source(row)) * inputs, *b = of_expert + (long long)(output) * inputs;
        float sum = 0.0f;
        for (int input = 0; input < inputs; input += 8) {
            float left[8], right[8];
            load8(a + input, left);
            load8(b + input, right);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += left[j] * right[j];
        }
        rows[(long long)(row) * outputs + output] = sum;
    }
#else
    __shared__ __align__(16) TileSums sums;
    PlainWeights<Act> weights(of_expert, {first_output, outputs, 0}, inputs);
    multiply_tile(sums, x, weights, source, tile.num_rows, inputs);
    __syncthreads();
    store_tile(sums, rows, first_output, outputs, tile.num_rows, [](float sum, int) { return sum; });
#endif
}

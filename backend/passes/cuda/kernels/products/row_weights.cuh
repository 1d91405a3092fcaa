// The weights of a product for few rows, and what its kernels share. Macros: ACT; WEIGHT, 16 for weights of the type Act,
// else 8 or 4 with the macros of quantised_weights.cuh; TILE_OUTPUTS.

#pragma once

#if WEIGHT == 16
#include "products/product_tiles.cuh"
using Scale = float;
using StreamedWeights = PlainWeights<Act>;
#else
#include "products/quantised_weights.cuh"
using StreamedWeights = QuantisedWeights;
#endif
#include "products/product_claims.cuh"

// A linear as kernels receive it: its weights [outputs, inputs], see PackedWeights, and bias [outputs] if has_bias. Its
// results are scale * (x · weights + bias).
struct RowLinear {
    const unsigned char* values;
    const Scale* scales;
    const unsigned char* zeros;
    const Act* bias;
    int outputs, inputs, has_bias;
    float scale;
    int blocks;

#if WEIGHT == 16
    __device__ __forceinline__ StreamedWeights weights(const TileColumns& columns) const {
        return {reinterpret_cast<const Act*>(values), columns, inputs};
    }
#else
    __device__ __forceinline__ StreamedWeights weights(const TileColumns& columns) const {
        return {PackedWeights{values, scales, zeros, inputs, blocks}, columns, 0};
    }
#endif
    // The result of an output from its sum of products, which lacks the factor of the row.
    __device__ __forceinline__ float finish(float sum, float of_row, int output) const {
#if WEIGHT != 16 && !GROUP && !BLOCKS
        sum *= scales[output];
#endif
        const float product = sum * of_row;
        return (has_bias ? product + to_float(bias[output]) : product) * scale;
    }
};

// Rows that an RMS norm lacks its factor of: x holds numbers times the norm's weight, squares [rows, num_parts] sums of
// squares of parts of each row. So the kernel before can write x without knowing whole rows.
struct WeighedRows {
    const Act* x;
    const float* squares;
    int num_parts;
    float eps;

    // Write each row's factor to `factors`, [kStreamRows] of shared memory.
    __device__ __forceinline__ void find_factors(float* factors, int num_rows, int inputs) const {
        constexpr int kRows = kStreamRows / kStreamWarps;  // of a warp, whose loads are in flight together
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float sums[kRows] = {};
        for (int part = lane; part < num_parts; part += 32)
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const int row = warp + i * kStreamWarps;
                if (row < num_rows) sums[i] += squares[row * num_parts + part];
            }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = warp + i * kStreamWarps;
            if (row >= num_rows) break;
            const float factor = 1.0f / sqrtf(reduce_lanes(sums[i], 32, Sum{}) / float(inputs) + eps);
            if (lane == 0) factors[row] = factor;
        }
    }
};

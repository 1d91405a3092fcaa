// Changes of a tile's scores before the softmax.

#pragma once

#include "prefill/prefill_products.cuh"

// Set the scores of tokens that a row may not see to -infinity. positions: of the query tile's rows, and kQueryRows
// further on, if SEES_AHEAD, the last that each sees; first: position of the first token.
__device__ __forceinline__ void mask(Scores& scores, const int* positions, int first, int window) {
    const int lane = int(threadIdx.x & 31), warp_row = int(threadIdx.x / 32 * kWarpRows);
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + block * 16 + half * 8 + (lane >> 2), offset = first + 2 * (lane & 3);
            const int position = positions[row] - offset;
            const int last = SEES_AHEAD ? positions[kQueryRows + row] - offset : position;
#pragma unroll
            for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = j * 8 + i;
                    if (column > last || column <= position - window) scores[block][j][2 * half + i] = -infinity();
                }
            }
        }
    }
}

// cap · tanh(scores · scale / cap)
__device__ __forceinline__ void cap_scores(Scores& scores, float scale, float cap) {
    const float to_exponent = 2.0f * kLog2E * scale / cap;
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float power = ex2_approx(scores[block][j][i] * to_exponent);
                scores[block][j][i] = cap - 2.0f * cap * rcp_approx(1.0f + power);
            }
        }
    }
}

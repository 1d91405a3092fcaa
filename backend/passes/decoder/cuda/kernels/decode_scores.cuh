// Shared by both kinds of decode attention: from q · k to logits, and the layout of a warp's results for the merge.

#pragma once

#include "decode_tiles.cuh"

constexpr int kMaxGroup = 16;
constexpr int kMergeStride = HEAD_DIM + 8;  // floats: rows that a warp writes at once begin in different banks
constexpr float kNoPeak = -1e30f;           // below all logits; finite, so that differences are not NaN

// The logit of tokens outside the row's span: their weight is 0.
__device__ __forceinline__ float hidden_logit() { return -infinity(); }

// Logits in units of log2(e): scale · q·k, or cap · tanh(scale · q·k / cap).
struct Scorer {
    float inner;
    float cap;  // 0: none

    __device__ __forceinline__ Scorer(float scale, float softcap)
        : inner(softcap > 0.0f ? scale / softcap : scale * kLog2E), cap(softcap * kLog2E) {}

    template <int N, int M> __device__ __forceinline__ void finish(float (&scores)[N][M]) const {
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int e = 0; e < M; ++e) scores[i][e] *= inner;
        if (cap == 0.0f) return;
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int e = 0; e < M; ++e) {
                // tanh x = 1 - 2 / (e^2x + 1): within 2^-21, which the cap makes a small logit.
                const float power = ex2_approx(scores[i][e] * (2.0f * kLog2E));
                scores[i][e] = fmaf(-2.0f * cap, rcp_approx(power + 1.0f), cap);
            }
    }
};

// Shared by both kinds of decode attention: from q · k to scores.

#pragma once

#include "decode/decode_tiles.cuh"

constexpr int kMaxGroup = 16;
constexpr float kNoPeak = -1e30f;  // below all scores; finite, so that differences are not NaN

// The score of tokens outside the row's span: their weight is 0.
__device__ __forceinline__ float hidden_score() { return -infinity(); }

// Turns q · k into scores that rise with the logits: with a cap, -1 / (1 + e^2x) instead of tanh x, so that a logit needs
// no operation more than without. A logit in units of log2(e) is slope · score + offset: scale · q·k, or
// cap · tanh(scale · q·k / cap).
struct Scorer {
    float inner;  // with a cap
    float slope, offset;

    __device__ __forceinline__ Scorer(float scale, float cap)
        : inner(cap > 0.0f ? 2.0f * kLog2E * scale / cap : 0.0f),
          slope(cap > 0.0f ? 2.0f * kLog2E * cap : kLog2E * scale), offset(kLog2E * cap) {}

    template <int N, int M> __device__ __forceinline__ void finish(float (&scores)[N][M]) const {
        if (inner == 0.0f) return;
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int e = 0; e < M; ++e) scores[i][e] = rcp_approx(-1.0f - ex2_approx(scores[i][e] * inner));
    }
    // Within 2^-21, which the cap makes a small logit.
    __device__ __forceinline__ float logit(float score) const { return fmaf(score, slope, offset); }
};

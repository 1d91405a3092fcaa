// One warp's part of decode attention for fp32 caches, with products and sums in fp32. For keys, four lanes share a
// token, and each takes every fourth piece of its dimensions. For values, each lane has its own dimensions.

#pragma once

#include "decode/decode_scores.cuh"

struct WarpHeads {
    static constexpr int kQuads = kMaxGroup / 4;                 // groups of 4 heads
    static constexpr int kOwnPieces = (HEAD_DIM / 4 + 31) / 32;  // a lane's pieces of the output, 4 dimensions each

    struct __align__(16) Shared {
        float queries[kMaxGroup][HEAD_DIM];
        float weights[NUM_WARPS][kTileTokens][kMaxGroup];
        float factors[NUM_WARPS][kMaxGroup];
    };

    Shared& shared;
    float out[kMaxGroup][kOwnPieces][4];
    float peak[kQuads], sum[kQuads];  // of heads 4 i + lane % 4; a sum covers this lane's tokens only

    __device__ __forceinline__ explicit WarpHeads(Shared& shared) : shared(shared) {}

    // Called by all warps of the block. first: the first query of the group.
    template <class T> __device__ __forceinline__ void load_queries(const T* first, int group) {
        for (int i = threadIdx.x; i < kMaxGroup * HEAD_DIM; i += 32 * NUM_WARPS)
            shared.queries[i / HEAD_DIM][i % HEAD_DIM] = i < group * HEAD_DIM ? to_float(first[i]) : 0.0f;
#pragma unroll
        for (int head = 0; head < kMaxGroup; ++head)
#pragma unroll
            for (int piece = 0; piece < kOwnPieces; ++piece)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[head][piece][e] = 0.0f;
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            peak[i] = kNoPeak;
            sum[i] = 0.0f;
        }
        __syncthreads();
    }

    // Turn the tile's scores into weights. The tile begins at `token`; only tokens in [begin, end) are visible.
    __device__ __forceinline__ void add_keys(const unsigned char* tile, const Scorer& scorer, int token, int begin,
                                             int end, int group) {
        float scores[kQuads][4];
        multiply_keys(scores, tile, group);
        float own[kQuads][1];
#pragma unroll
        for (int i = 0; i < kQuads; ++i) own[i][0] = sum_of_lanes(scores[i]);
        scorer.finish(own);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) own[i][0] = scorer.logit(own[i][0]);
        const int t = token + threadIdx.x % 32 / 4;
        if (t < begin || t >= end)
#pragma unroll
            for (int i = 0; i < kQuads; ++i) own[i][0] = hidden_score();
        raise_peaks(own, group);
        float* weights = shared.weights[threadIdx.x / 32][threadIdx.x % 32 / 4];
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const float weight = ex2_approx(own[i][0] - peak[i]);
            sum[i] += weight;
            weights[4 * i + threadIdx.x % 4] = weight;
        }
    }

    // Call after a __syncwarp that follows add_keys.
    __device__ __forceinline__ void add_values(const unsigned char* tile, int, int, int group) {
        const int lane = threadIdx.x % 32;
        for (int token = 0; token < kTileTokens; ++token) {
            float4 values[kOwnPieces];
#pragma unroll
            for (int piece = 0; piece < kOwnPieces; ++piece)
                values[piece] = piece * 32 + lane < HEAD_DIM / 4
                                    ? reinterpret_cast<const float4*>(tile + token * kRowStride)[piece * 32 + lane]
                                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                if (4 * i >= group) break;
                const float4 weights =
                    *reinterpret_cast<const float4*>(&shared.weights[threadIdx.x / 32][token][4 * i]);
                const float weight[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
                for (int h = 0; h < 4; ++h)
#pragma unroll
                    for (int piece = 0; piece < kOwnPieces; ++piece) {
                        float(&acc)[4] = out[4 * i + h][piece];
                        acc[0] = fmaf(weight[h], values[piece].x, acc[0]);
                        acc[1] = fmaf(weight[h], values[piece].y, acc[1]);
                        acc[2] = fmaf(weight[h], values[piece].z, acc[2]);
                        acc[3] = fmaf(weight[h], values[piece].w, acc[3]);
                    }
            }
        }
    }

    // Store the results of eight heads, from kFirst on: rows [8][kMergeStride]; peaks [group], each head's peak and sum.
    template <int kFirst>
    __device__ __forceinline__ void store(float* rows, float2* peaks, const Scorer&, int group) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int head = kFirst; head < kFirst + 8; ++head)
#pragma unroll
            for (int piece = 0; piece < kOwnPieces; ++piece) {
                const float(&x)[4] = out[head][piece];
                if (head < group && piece * 32 + lane < HEAD_DIM / 4)
                    reinterpret_cast<float4*>(rows + (head - kFirst) * kMergeStride)[piece * 32 + lane] =
                        make_float4(x[0], x[1], x[2], x[3]);
            }
#pragma unroll
        for (int i = kFirst / 4; i < kFirst / 4 + 2; ++i) {
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], distance);
            if (lane < 4 && 4 * i + lane < group) peaks[4 * i + lane] = make_float2(peak[i], sum[i]);
        }
    }

  private:
    // Partial products over this lane's dimensions.
    __device__ __forceinline__ void multiply_keys(float (&scores)[kQuads][4], const unsigned char* tile, int group) {
        const int token = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kQuads; ++i)
#pragma unroll
            for (int h = 0; h < 4; ++h) scores[i][h] = 0.0f;
#pragma unroll 4
        for (int piece = quarter; piece < HEAD_DIM / 4; piece += 4) {
            const float4 key = reinterpret_cast<const float4*>(tile + token * kRowStride)[piece];
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                if (4 * i >= group) break;
#pragma unroll
                for (int h = 0; h < 4; ++h) {
                    const float4 query = reinterpret_cast<const float4*>(shared.queries[4 * i + h])[piece];
                    float& score = scores[i][h];
                    score = fmaf(query.x, key.x, score);
                    score = fmaf(query.y, key.y, score);
                    score = fmaf(query.z, key.z, score);
                    score = fmaf(query.w, key.w, score);
                }
            }
        }
    }

    // Four lanes have partial scores of four heads each; returns the sum of head lane % 4.
    __device__ __forceinline__ static float sum_of_lanes(const float (&scores)[4]) {
        const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
        const float low = (odd ? scores[1] : scores[0]) + __shfl_xor_sync(0xffffffffu, odd ? scores[0] : scores[1], 1);
        const float high = (odd ? scores[3] : scores[2]) + __shfl_xor_sync(0xffffffffu, odd ? scores[2] : scores[3], 1);
        return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
    }

    // Most tiles raise no peak, and then nothing is scaled. Scaling by 1 would not change any bit.
    __device__ __forceinline__ void raise_peaks(const float (&scores)[kQuads][1], int group) {
        const int lane = threadIdx.x % 32;
        float top[kQuads];
        bool raised = false;
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            top[i] = fmaxf(peak[i], scores[i][0]);
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], distance));
            raised = raised || top[i] > peak[i];
        }
        if (!__any_sync(0xffffffffu, raised)) return;
        float* factors = shared.factors[threadIdx.x / 32];
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const float factor = ex2_approx(peak[i] - top[i]);
            if (lane < 4) factors[4 * i + lane] = factor;
            sum[i] *= factor;
            peak[i] = top[i];
        }
        __syncwarp();
#pragma unroll
        for (int head = 0; head < kMaxGroup; ++head) {
            if (head >= group) break;
            const float factor = factors[head];
#pragma unroll
            for (int piece = 0; piece < kOwnPieces; ++piece)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[head][piece][e] *= factor;
        }
    }
};

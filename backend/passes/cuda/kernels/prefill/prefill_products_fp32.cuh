// prefill_products.cuh in fp32, without tensor cores. For scores, a lane has one token of the tile; for sums, every 32nd
// value of the head.
//
// Macros: HEAD_DIM, KV_DTYPE (0).

#pragma once

#include "prefill/prefill_tile.cuh"

constexpr int kThreads = 256;
constexpr int kWarpRows = HEAD_DIM <= 128 ? 8 : 4;
constexpr int kQueryRows = kThreads / 32 * kWarpRows;
constexpr int kTokens = 32;
constexpr int kChunks = HEAD_DIM / 4;               // of 4 values
constexpr int kLaneValues = (HEAD_DIM + 31) / 32;   // of a head; not every lane has the last one

__device__ __forceinline__ void load_queries(float* target, const QueryTile<kQueryRows>& tile, const void* qkv,
                                             int row_heads, int act) {
    const int first_head = int(blockIdx.x) * tile.group;
    for (int i = int(threadIdx.x); i < kQueryRows * HEAD_DIM / 8; i += kThreads) {
        const int row = i / (HEAD_DIM / 8), place = i % (HEAD_DIM / 8) * 8;
        float x[8] = {};
        if (row < tile.num_rows) {
            load8_act(qkv, tile.head(row, row_heads, first_head) * HEAD_DIM + place, act, x);
        }
        store8(target + row * HEAD_DIM + place, x);
    }
}

// scores[r] = query r of the warp · the lane's key
__device__ __forceinline__ void score(float (&scores)[kWarpRows], const float* queries, const unsigned char* keys) {
    const unsigned lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) scores[r] = 0.0f;
#pragma unroll 4
    for (int c = 0; c < kChunks; ++c) {
        const float4 k = *reinterpret_cast<const float4*>(keys + swizzled<kChunks>(lane, c) * 16);
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
            const float4 q = *reinterpret_cast<const float4*>(queries + r * HEAD_DIM + 4 * c);
            scores[r] += q.x * k.x;
            scores[r] += q.y * k.y;
            scores[r] += q.z * k.z;
            scores[r] += q.w * k.w;
        }
    }
}

// sums[r] += weights[r] · values
__device__ __forceinline__ void accumulate(float (&sums)[kWarpRows][kLaneValues], const float (&weights)[kWarpRows],
                                           const unsigned char* values) {
    const unsigned lane = threadIdx.x & 31;
#pragma unroll 4
    for (int token = 0; token < kTokens; ++token) {
        float v[kLaneValues];
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) {
            const unsigned place = lane + 32 * i;
            const unsigned char* chunk = values + swizzled<kChunks>(token, place / 4) * 16;
            v[i] = place < HEAD_DIM ? reinterpret_cast<const float*>(chunk)[place % 4] : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
            const float weight = __shfl_sync(kWholeWarp, weights[r], token);
#pragma unroll
            for (int i = 0; i < kLaneValues; ++i) sums[r][i] += weight * v[i];
        }
    }
}

__device__ __forceinline__ void store_act(void* array, long long index, int act, float x) {
    if (act == 0) {
        static_cast<float*>(array)[index] = x;
    } else {
        static_cast<unsigned short*>(array)[index] = act == 1 ? float_to_bf16(x) : float_to_f16(x);
    }
}

// The weight of a score x of a row, of which each lane has one. Updates the row's state with this tile: by exactly 0 and
// 1 if all scores are -infinity.
__device__ __forceinline__ float weigh(float x, float& largest, float& total, float (&sums)[kLaneValues]) {
    const float top = fmaxf(largest, reduce_lanes(x, 32, Largest{}));
    const float base = top == -infinity() ? 0.0f : top;  // -infinity: the row has seen no token yet
    const float shrink = ex2_approx((largest - base) * kLog2E);
    const float weight = ex2_approx((x - base) * kLog2E);
    total = total * shrink + weight;
    largest = top;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) sums[i] *= shrink;
    return weight;
}

// sinks [q heads] or nullptr.
__device__ __forceinline__ void store_outputs(void* out, const QueryTile<kQueryRows>& tile, int act,
                                              const float (&sums)[kWarpRows][kLaneValues],
                                              const float (&largest)[kWarpRows], const float (&totals)[kWarpRows],
                                              const float* sinks) {
    const int lane = int(threadIdx.x & 31), warp_row = int(threadIdx.x / 32 * kWarpRows);
    const int heads_per_token = tile.group * int(gridDim.x), first_head = int(blockIdx.x) * tile.group;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
        const float total = reduce_lanes(totals[r], 32, Sum{});
        if (warp_row + r >= tile.num_rows) continue;
        const float sink = sinks == nullptr ? -infinity() : sinks[first_head + tile.head_of_group(warp_row + r)];
        const float factor = 1.0f / sum_with_sink(largest[r] * kLog2E, total, sink);
        const long long start = tile.head(warp_row + r, heads_per_token, first_head) * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) {
            if (lane + 32 * i < HEAD_DIM) store_act(out, start + lane + 32 * i, act, sums[r][i] * factor);
        }
    }
}

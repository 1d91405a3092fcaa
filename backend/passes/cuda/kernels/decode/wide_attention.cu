// Attention of tokens over the paged keys and values of their sequences, for heads of up to 512 numbers, in fp32 without
// tensor cores. Decodes and prompts alike.
//
// A block has a query head of a token. Its warps take groups of kTokens of the context in turn, each with a softmax state
// of its own; the states are merged in the warps' order. So a result depends only on the token's sequence.
//
// Macros: ACT, KV_DTYPE.

#include "common/reduce.cuh"
#include "common/values.cuh"
#include "step/step_rows.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTokens = 4;   // whose loads are in flight together
constexpr int kChunks = 2;   // of 8 numbers, of a lane
constexpr int kMaxHead = 32 * 8 * kChunks;

using Numbers = float[kChunks][8];  // of a head: chunk lane + 32 i in [i]; zeros past its end

template <class T> __device__ __forceinline__ void load_head(const T* head, int head_dim, Numbers& x) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        const int at = 8 * (threadIdx.x % 32 + 32 * i);
        if (at < head_dim) {
            load8(head + at, x[i]);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) x[i][j] = 0.0f;
        }
    }
}

__device__ __forceinline__ void load_stored(const KvBlock& block, int place, int head_dim, Numbers& x) {
    load_head(block.row(place, head_dim), head_dim, x);
#if KV_DTYPE == 2
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        const int at = 8 * (threadIdx.x % 32 + 32 * i);
        const float scale = at < head_dim ? to_float(block.row_scales(place, head_dim)[at / kQ8Block]) : 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] *= scale;
    }
#endif
}

// qkv [T, row_heads, head_dim], queries first; out [T, heads, head_dim]; layer: start of the layer's pages; page_table
// [slots, max_pages]; a slot of -1 is padding. soft_cap: 0 for none. Blocks: x tokens, y query heads.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    wide_attention(Act* __restrict__ out, const Act* __restrict__ qkv, unsigned char* layer,
                   const int* __restrict__ page_table, const int* __restrict__ query_starts,
                   const int* __restrict__ context_lens, const int* __restrict__ slots, int num_rows, int max_pages,
                   int page_size, int row_heads, int num_kv_heads, int head_dim, float scale, float soft_cap) {
    __shared__ __align__(16) float warp_sums[kWarps][kMaxHead];
    __shared__ float peaks[kWarps], totals[kWarps];
    const int token = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = row_of_token(token, query_starts, num_rows), slot = slots[row];
    if (slot < 0) return;
    const int position = context_lens[row] + token - query_starts[row];
    const int kv_head = head / (gridDim.y / num_kv_heads);
    const int* const pages = page_table + (long long)(slot) * max_pages;
    Numbers query, sums = {};
    load_head(qkv + ((long long)(token) * row_heads + head) * head_dim, head_dim, query);
    float peak = -infinity(), total = 0.0f;
    for (int first = warp * kTokens; first <= position; first += kWarps * kTokens) {
        const int page = pages[first / page_size];  // kTokens divides page_size
        float scores[kTokens], top = peak;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            Numbers key;
            const int place = min(first + t, position) % page_size;
            load_stored(KvBlock(layer, page, 0, kv_head, num_kv_heads, page_size, head_dim), place, head_dim, key);
            float x = 0.0f;
#pragma unroll
            for (int i = 0; i < kChunks; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) x = fmaf(query[i][j], key[i][j], x);
            scores[t] = x;
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            float x = reduce_lanes(scores[t], 32, Sum{}) * scale;
            if (soft_cap > 0.0f) x = soft_cap * tanhf(x / soft_cap);
            scores[t] = first + t <= position ? x : -infinity();
            top = fmaxf(top, scores[t]);
        }
        const float shrink = expf(peak - top);
        peak = top;
        total *= shrink;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[i][j] *= shrink;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            Numbers value;
            const int place = min(first + t, position) % page_size;
            load_stored(KvBlock(layer, page, 1, kv_head, num_kv_heads, page_size, head_dim), place, head_dim, value);
            const float weight = expf(scores[t] - peak);
            total += weight;
#pragma unroll
            for (int i = 0; i < kChunks; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(weight, value[i][j], sums[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) store8(&warp_sums[warp][8 * (lane + 32 * i)], sums[i]);
    if (lane == 0) peaks[warp] = peak, totals[warp] = total;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, peaks[w]);
    for (int at = threadIdx.x; at < head_dim; at += kThreads) {
        float sum = 0.0f, weights = 0.0f;
        for (int w = 0; w < kWarps; ++w) {
            const float factor = expf(peaks[w] - peak);
            sum = fmaf(factor, warp_sums[w][at], sum);
            weights = fmaf(factor, totals[w], weights);
        }
        out[((long long)(token) * gridDim.y + head) * head_dim + at] = from_float<Act>(sum / weights);
    }
}

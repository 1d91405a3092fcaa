// The products and the softmax of attention on the tensor cores, shared by the kernels over the paged cache and over a
// step's own keys and values. A warp has its own 16 or 32 query rows.
//
// Macros: HEAD_DIM, KV_DTYPE (1: bf16; otherwise products are fp16); QUERY_ROWS of a block (64 or 128) and KEY_TOKENS
// of a tile (32 or 64), if they are not those below. NUM_WARPGROUPS: of a block whose products are those of warpgroups.

#pragma once

#include "prefill/prefill_tile.cuh"

#ifndef QUERY_ROWS
#define QUERY_ROWS (HEAD_DIM <= 128 ? 128 : 64)
#endif
#ifndef KEY_TOKENS
#define KEY_TOKENS (HEAD_DIM <= 128 ? 64 : 32)
#endif

#ifdef NUM_WARPGROUPS
constexpr int kThreads = 128 * NUM_WARPGROUPS;  // that compute
#else
constexpr int kThreads = 128;
#endif
constexpr int kQueryRows = QUERY_ROWS;
constexpr int kWarpRows = kQueryRows / (kThreads / 32);
constexpr int kWarpBlocks = kWarpRows / 16;
constexpr int kTokens = KEY_TOKENS;  // of a tile of keys or values
constexpr int kSteps = (HEAD_DIM + 15) / 16;  // of a product over a head's values
constexpr int kChunks = 2 * kSteps;  // 16-byte chunks of a head's 16-bit values; an odd head has a chunk of zeros
constexpr int kScoreUnroll = KV_DTYPE == 1 ? 2 : 1;  // as much as registers allow

#if KV_DTYPE == 1
using Factor = Bf16;
#else
using Factor = Fp16;
#endif

__device__ __forceinline__ void multiply(Bf16, float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma_m16n8k16_bf16(acc, a, b0, b1);
}
__device__ __forceinline__ void multiply(Fp16, float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma_m16n8k16_f16(acc, a, b0, b1);
}

// Fragments of blocks of 16 rows, of which each lane has two: [.][0, 1] of row lane / 4, [.][2, 3] of row lane / 4 + 8.
using Scores = float[kWarpBlocks][kTokens / 8][4];
using Weights = unsigned[kWarpBlocks][kTokens / 16][4];  // the softmax of scores, as operands of the product
using Sums = float[kWarpBlocks][kChunks][4];
using PerRow = float[kWarpBlocks][2];

// A barrier of the threads that compute.
__device__ __forceinline__ void sync_threads() {
#ifdef NUM_WARPGROUPS
    sync_some<kThreads>(1);
#else
    __syncthreads();
#endif
}

// The state of rows that have seen no token.
__device__ __forceinline__ void reset(Sums& sums, PerRow& references, PerRow& totals) {
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[block][c][i] = 0.0f;
        }
        references[block][0] = references[block][1] = -infinity();
        totals[block][0] = totals[block][1] = 0.0f;
    }
}

// Where a 16-byte chunk of a query is in shared memory.
__device__ __forceinline__ int query_place(int row, int chunk) {
#ifdef NUM_WARPGROUPS
    return chunk / 8 * (kQueryRows * 128) + row * 128 + (chunk % 8 ^ row % 8) * 16;
#else
    return int(swizzled<kChunks>(row, chunk)) * 16;
#endif
}

// Load the tile's queries, swizzled; rows that do not exist become 0. thread: of THREADS that call.
template <int THREADS, int AT_ONCE, class T>
__device__ __forceinline__ void load_queries_of(unsigned char* target, const QueryTile<kQueryRows>& tile, const T* qkv,
                                                int row_heads, int first_head, int thread) {
    constexpr int kAll = kQueryRows * kChunks, kAtOnce = AT_ONCE;
#pragma unroll 1
    for (int first = thread; first < kAll; first += kAtOnce * THREADS) {
        float x[kAtOnce][8];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {  // no branch, so that the loads do not wait for each other
            const int i = first + n * THREADS, row = min(i / kChunks, tile.num_rows - 1);
            const int place = min(i % kChunks * 8, HEAD_DIM - 8);
            load8(qkv + tile.head(row, row_heads, first_head) * HEAD_DIM + place, x[n]);
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            const int i = first + n * THREADS, row = i / kChunks;
            if (i >= kAll) break;
#pragma unroll
            for (int e = 0; e < 8; ++e)
                x[n][e] = row < tile.num_rows && i % kChunks * 8 < HEAD_DIM ? x[n][e] : 0.0f;
            store8(reinterpret_cast<Factor*>(target + query_place(row, i % kChunks)), x[n]);
        }
    }
}
template <int THREADS = kThreads, int AT_ONCE = 4>
__device__ __forceinline__ void load_queries(unsigned char* target, const QueryTile<kQueryRows>& tile, const void* qkv,
                                             int row_heads, int act, int kv_head, int thread) {
    const int first = kv_head * tile.group;
    if (act == 0) load_queries_of<THREADS, AT_ONCE>(target, tile, static_cast<const float*>(qkv), row_heads, first, thread);
    else if (act == 1) load_queries_of<THREADS, AT_ONCE>(target, tile, static_cast<const Bf16*>(qkv), row_heads, first, thread);
    else load_queries_of<THREADS, AT_ONCE>(target, tile, static_cast<const Fp16*>(qkv), row_heads, first, thread);
}

// scores = queries · keysᵀ for the warp's rows.
__device__ __forceinline__ void score(Scores& scores, const unsigned char* queries, const unsigned char* keys) {
    const unsigned lane = threadIdx.x & 31, warp_row = threadIdx.x / 32 * kWarpRows;
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[block][j][i] = 0.0f;
        }
    }
#pragma unroll kScoreUnroll
    for (int step = 0; step < kSteps; ++step) {
        unsigned q[kWarpBlocks][4];
#pragma unroll
        for (int block = 0; block < kWarpBlocks; ++block) {
            const unsigned row = warp_row + block * 16 + (lane & 15);
            ldmatrix_x4(q[block], queries + swizzled<kChunks>(row, 2 * step + (lane >> 4)) * 16);
        }
#pragma unroll
        for (int j = 0; j < kTokens / 8; j += 2) {
            unsigned k[4];
            const unsigned row = j * 8 + (lane & 7) + (lane >> 4) * 8;
            ldmatrix_x4(k, keys + swizzled<kChunks>(row, 2 * step + (lane >> 3 & 1)) * 16);
#pragma unroll
            for (int block = 0; block < kWarpBlocks; ++block) {
                multiply(Factor{}, scores[block][j], q[block], k[0], k[1]);
                multiply(Factor{}, scores[block][j + 1], q[block], k[2], k[3]);
            }
        }
    }
}

constexpr float kSlack = 8.0f;  // in powers of 2

// Raise a row's reference to its largest score so far, if that is more than kSlack higher: so most tiles scale no sums.
// Return what the row's earlier sums must be multiplied by, exactly 1 where the reference stays.
__device__ __forceinline__ float raise_reference(float& reference, const Scores& scores, int block, int half,
                                                 float to_log2) {
    float top = reference;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
        top = fmaxf(top, fmaxf(scores[block][j][2 * half], scores[block][j][2 * half + 1]));
    }
    top = reduce_lanes(top, 4, Largest{});
    if (!((top - reference) * to_log2 > kSlack)) return 1.0f;  // also if both are -infinity: no token seen yet
    const float shrink = ex2_approx((reference - top) * to_log2);
    reference = top;
    return shrink;
}
__device__ __forceinline__ float offset_of(float reference, float to_log2) {
    return reference == -infinity() ? 0.0f : reference * to_log2;
}

// weights = 2^((scores - reference) · to_log2), up to 2^kSlack. Updates references and totals with this tile; a lane's
// totals cover its own columns.
__device__ __forceinline__ void softmax(Weights& weights, const Scores& scores, Sums& sums, PerRow& references,
                                        PerRow& totals, float to_log2) {
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float shrink = raise_reference(references[block][half], scores, block, half, to_log2);
            if (__any_sync(kWholeWarp, shrink != 1.0f)) {
                totals[block][half] *= shrink;
#pragma unroll
                for (int c = 0; c < kChunks; ++c) {
                    sums[block][c][2 * half] *= shrink;
                    sums[block][c][2 * half + 1] *= shrink;
                }
            }
            const float offset = offset_of(references[block][half], to_log2);
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < kTokens / 8; ++j) {
                const float a = ex2_approx(scores[block][j][2 * half] * to_log2 - offset);
                const float b = ex2_approx(scores[block][j][2 * half + 1] * to_log2 - offset);
                total += a + b;
                weights[block][j / 2][2 * (j & 1) + half] = pack(Factor{}, a, b);
            }
            totals[block][half] += total;
        }
    }
}

// sums += weights · values
__device__ __forceinline__ void accumulate(Sums& sums, const Weights& weights, const unsigned char* values) {
    const unsigned lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
#pragma unroll
        for (int c = 0; c < kChunks; c += 2) {
            unsigned v[4];
            ldmatrix_x4_trans(v, values + swizzled<kChunks>(step * 16 + (lane & 15), c + (lane >> 4)) * 16);
#pragma unroll
            for (int block = 0; block < kWarpBlocks; ++block) {
                multiply(Factor{}, sums[block][c], weights[block][step], v[0], v[1]);
                multiply(Factor{}, sums[block][c + 1], weights[block][step], v[2], v[3]);
            }
        }
    }
}

__device__ __forceinline__ void store_pair(void* array, long long index, int act, float a, float b) {
    if (act == 0) {
        *reinterpret_cast<float2*>(static_cast<float*>(array) + index) = make_float2(a, b);
    } else {
        const unsigned pair = act == 1 ? pack(Bf16{}, a, b) : pack(Fp16{}, a, b);
        *reinterpret_cast<unsigned*>(static_cast<unsigned short*>(array) + index) = pair;
    }
}

// sinks [q heads] or nullptr.
__device__ __forceinline__ void store_outputs(void* out, const Task& task, const QueryTile<kQueryRows>& tile, int act,
                                              const Sums& sums, const PerRow& references, const PerRow& totals,
                                              float to_log2, const float* sinks) {
    const int lane = int(threadIdx.x & 31), warp_row = int(threadIdx.x / 32 * kWarpRows);
    const int heads_per_token = tile.group * task.num_kv_heads, first_head = task.kv_head * tile.group;
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float total = reduce_lanes(totals[block][half], 4, Sum{});
            const int row = warp_row + block * 16 + half * 8 + (lane >> 2);
            if (row >= tile.num_rows) continue;
            const float sink = sinks == nullptr ? -infinity() : sinks[first_head + tile.head_of_group(row)];
            const float factor = 1.0f / sum_with_sink(references[block][half] * to_log2, total, sink);
            const long long start = tile.head(row, heads_per_token, first_head) * HEAD_DIM + 2 * (lane & 3);
#pragma unroll
            for (int c = 0; c < HEAD_DIM / 8; ++c) {
                store_pair(out, start + c * 8, act, sums[block][c][2 * half] * factor,
                           sums[block][c][2 * half + 1] * factor);
            }
        }
    }
}

// One warp's part of decode attention for 16-bit and 8-bit caches: the queries of a group, padded to the 16 rows of
// mma.m16n8k16, attend to the warp's tiles.

#pragma once

#include "decode/decode_scores.cuh"
#include "common/reduce.cuh"

struct WarpHeads {
    static constexpr int kTiles = kTileTokens / 8;
    static constexpr int kSteps = HEAD_DIM / 16;

    // The query fragments are in each warp's registers, or in shared memory if outputs or scales need the registers.
    static constexpr bool kSharedQueries = kIsWide || KV_DTYPE == 2;
    struct Shared {
        uint4 queries[kSharedQueries ? kSteps : 1][32];
    };

    Shared& shared;
    unsigned queries[kSharedQueries ? 1 : kSteps][4];
    unsigned weights[kTileTokens / 16][4];
    float out[HEAD_DIM / 8][4];  // rows lane / 4 and lane / 4 + 8
    float peak[2], sum[2];       // of those rows: the greatest score, and the sum of weights of this lane's tokens
#if KV_DTYPE == 2
    static constexpr int kBlocks = HEAD_DIM / kQ8Block;
    static constexpr int kSums = kIsWide ? 1 : kBlocks;
    float query_sums[kSums][4];  // of those rows, twice each: -kRaised times a block's sum of queries
#endif

    __device__ __forceinline__ explicit WarpHeads(Shared& shared) : shared(shared) {}

    // Called by all warps of the block. first: the first query of the group.
    template <class T> __device__ __forceinline__ void load_queries(const T* first, int group) {
        if constexpr (kSharedQueries) {
            for (int step = threadIdx.x / 32; step < kSteps; step += NUM_WARPS) {
                unsigned query[4];
                load_query(query, first, group, step);
                shared.queries[step][threadIdx.x % 32] = make_uint4(query[0], query[1], query[2], query[3]);
            }
            __syncthreads();
        } else {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) load_query(queries[step], first, group, step);
        }
#if KV_DTYPE == 2
        if constexpr (!kIsWide) sum_queries();
#endif
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[i][e] = 0.0f;
        peak[0] = peak[1] = kNoPeak;
        sum[0] = sum[1] = 0.0f;
    }

    // Turn the tile's scores into weights. The tile begins at `token`; only tokens in [begin, end) are visible.
    __device__ __forceinline__ void add_keys(const unsigned char* tile, const Scorer& scorer, int token, int begin,
                                             int end, int) {
        float scores[kTiles][4];
        score(scores, tile);
        scorer.finish(scores);
        if (token < begin || token + kTileTokens > end) {
            const int own = token + threadIdx.x % 4 * 2;
            const unsigned visible = bits_from(begin - own) & ~bits_from(end - own);
#pragma unroll
            for (int i = 0; i < kTiles; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (!(visible >> (8 * i + e % 2) & 1)) scores[i][e] = hidden_score();
        }
        raise_peaks(scores, scorer.slope);
        const float bounds[2] = {fmaf(peak[0], scorer.slope, -kHeadroom), fmaf(peak[1], scorer.slope, -kHeadroom)};
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                scores[i][e] = ex2_approx(fmaf(scores[i][e], scorer.slope, -bounds[e / 2]));
                sum[e / 2] += scores[i][e];
            }
            weights[i / 2][i % 2 * 2] = pack_operands(scores[i][0], scores[i][1]);
            weights[i / 2][i % 2 * 2 + 1] = pack_operands(scores[i][2], scores[i][3]);
        }
    }

    __device__ __forceinline__ void add_values(unsigned char* tile, int token, int end, int) {
#if KV_DTYPE == 2
        if (token + kTileTokens > end) hide_scales(tile, token, end);
        const TileScales scales(tile);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            unsigned scaled[kTileTokens / 16][4];
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                const unsigned pair = scales.of_tokens(i, block);
                scaled[i / 2][i % 2 * 2] = mul_f16x2(weights[i / 2][i % 2 * 2], pair);
                scaled[i / 2][i % 2 * 2 + 1] = mul_f16x2(weights[i / 2][i % 2 * 2 + 1], pair);
            }
            add_block(tile, 2 * block, scaled);
            add_block(tile, 2 * block + 1, scaled);
        }
#else
#pragma unroll
        for (int block = 0; block < HEAD_DIM / 16; ++block) add_block(tile, block, weights);
#endif
    }

    // Store the results of eight heads, from kFirst on: rows [8][kMergeStride]; peaks [group], each head's peak as a
    // logit, to which weights are relative, and sum.
    template <int kFirst>
    __device__ __forceinline__ void store(float* rows, float2* peaks, const Scorer& scorer, int group) {
        constexpr int half = kFirst / 8;
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
        const int place = threadIdx.x % 32 / 4, head = kFirst + place;
        if (head >= group) return;
        float* row = rows + place * kMergeStride;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i += 2)
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) row[output_dim(i / 2, n, e)] = out[i + n][2 * half + e];
        if (threadIdx.x % 4 == 0) peaks[head] = make_float2(scorer.logit(peak[half]) - kHeadroom, sum[half]);
    }

  private:
#if KV_DTYPE == 2
    // Weights are relative to a power of two below the peak, because times a small scale they would have few digits.
    static constexpr float kHeadroom = 7.0f;

    // A block's sum of products begins where the raised keys end at the keys' own sum.
    __device__ __forceinline__ void sum_queries() {
#pragma unroll
        for (int block = 0; block < kSums; ++block) {
            float sums[2] = {0.0f, 0.0f};
#pragma unroll
            for (int step = 2 * block; step < 2 * block + 2; ++step) {
                unsigned query[4];
                read_query(query, step);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float low, high;
                    unpack(Fp16{}, query[i], low, high);
                    sums[i % 2] += low + high;
                }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) query_sums[block][e] = -kRaised * reduce_lanes(sums[e / 2], 4, Sum{});
        }
    }

    __device__ __forceinline__ void score(float (&scores)[kTiles][4], const unsigned char* tile) const {
        const TileScales scales(tile);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][e] = 0.0f;
#pragma unroll(kIsWide ? 1 : kBlocks)
        for (int block = 0; block < kBlocks; ++block) {
            float parts[kTiles][4];
#pragma unroll
            for (int i = 0; i < kTiles; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) parts[i][e] = kIsWide ? 0.0f : query_sums[kIsWide ? 0 : block][e];
            add_products(parts, tile, 2 * block);
            add_products(parts, tile, 2 * block + 1);
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                const float of_tokens[2] = {f16_to_float(scales.of_token(i, 0, block)),
                                            f16_to_float(scales.of_token(i, 1, block))};
#pragma unroll
                for (int e = 0; e < 4; ++e) scores[i][e] = fmaf(parts[i][e], of_tokens[e % 2], scores[i][e]);
            }
        }
    }
#else
    static constexpr float kHeadroom = 0.0f;

    __device__ __forceinline__ void score(float (&scores)[kTiles][4], const unsigned char* tile) const {
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][e] = 0.0f;
#pragma unroll(kSharedQueries ? 2 : kSteps)
        for (int step = 0; step < kSteps; ++step) add_products(scores, tile, step);
    }
#endif

    // The bits from the n-th on, of 31; n may be outside.
    __device__ __forceinline__ static unsigned bits_from(int n) { return ~0u << min(max(n, 0), 31); }

    // scores += the queries' products with 16 dimensions of the keys.
    __device__ __forceinline__ void add_products(float (&scores)[kTiles][4], const unsigned char* tile, int step) const {
        unsigned keys[kTiles][2];
        load_keys(keys, tile, step);
        unsigned query[4];
        read_query(query, step);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) mma(scores[i], query, keys[i][0], keys[i][1]);
    }

    // out += the weights' products with 16 dimensions of the values.
    __device__ __forceinline__ void add_block(const unsigned char* tile, int block,
                                              const unsigned (&of_tokens)[kTileTokens / 16][4]) {
        unsigned values[kTileTokens / 16][2][2];
        load_values(values, tile, block);
#pragma unroll
        for (int k = 0; k < kTileTokens / 16; ++k)
#pragma unroll
            for (int n = 0; n < 2; ++n) mma(out[2 * block + n], of_tokens[k], values[k][n][0], values[k][n][1]);
    }

    __device__ __forceinline__ static unsigned load_operands(const float* pair) {
        const float2 x = *reinterpret_cast<const float2*>(pair);
        return pack_operands(x.x, x.y);
    }
    template <class T> __device__ __forceinline__ static unsigned load_operands(const T* pair) {
        float low, high;
        unpack(T{}, *reinterpret_cast<const unsigned*>(pair), low, high);
        return pack_operands(low, high);
    }

    template <class T>
    __device__ __forceinline__ static void load_query(unsigned (&query)[4], const T* first, int group, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int head = threadIdx.x % 32 / 4 + i % 2 * 8;
            query[i] = head < group ? load_operands(first + head * HEAD_DIM + query_dim(step, i / 2)) : 0;
        }
    }

    __device__ __forceinline__ void read_query(unsigned (&query)[4], int step) const {
        if constexpr (kSharedQueries) {
            const uint4 x = shared.queries[step][threadIdx.x % 32];
            query[0] = x.x, query[1] = x.y, query[2] = x.z, query[3] = x.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) query[i] = queries[step][i];
        }
    }

    // Most tiles raise no peak, and then nothing is scaled. Scaling by 1 would not change any bit.
    __device__ __forceinline__ void raise_peaks(const float (&scores)[kTiles][4], float slope) {
        float top[2] = {peak[0], peak[1]};
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], scores[i][e]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
            top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
        }
        if (!__any_sync(0xffffffffu, top[0] > peak[0] || top[1] > peak[1])) return;
        const float factor[2] = {ex2_approx((peak[0] - top[0]) * slope), ex2_approx((peak[1] - top[1]) * slope)};
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[i][e] *= factor[e / 2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] *= factor[half];
            peak[half] = top[half];
        }
    }
};

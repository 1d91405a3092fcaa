// Tiles of keys or values in shared memory: copying them there, and reading fragments of mma.m16n8k16 from them. A warp
// works on one tile at a time. Macros: KV_DTYPE, HEAD_DIM.

#pragma once

#include "common/values.cuh"

// One ldmatrix loads 16 dimensions: of 32 tokens with 8-bit numbers, of 16 tokens with 16-bit numbers.
constexpr int kTileTokens = 32 / int(sizeof(Kv));
constexpr int kRowBytes = HEAD_DIM * int(sizeof(Kv));
constexpr int kRowPieces = kRowBytes / 16;
// Rows that are read at once must begin in different banks. For ldmatrix, a row must be an odd number of pieces. The
// fp32 kernel reads half a row of banks from each of two tokens; there it must be 4 more than a multiple of 8.
constexpr int kRowStride = 16 * (sizeof(Kv) == 4 ? kRowPieces + (12 - kRowPieces % 8) % 8 : kRowPieces | 1);
constexpr int kScaleRowBytes = kKvHasScales ? HEAD_DIM / kQ8Block * int(sizeof(Fp16)) : 0;
constexpr int kTileBytes = kTileTokens * (kRowStride + kScaleRowBytes);  // rows, then all scales

// A warp's results of kMergeHeads heads take the memory of one tile. Rows that it writes at once should begin in
// different banks.
constexpr int kMergeHeads = 8;
constexpr int kMergeStride = kMergeHeads * (HEAD_DIM + 8) * 4 <= kTileBytes ? HEAD_DIM + 8 : HEAD_DIM;  // floats
static_assert(kMergeHeads * kMergeStride * 4 <= kTileBytes, "a tile is too small for a warp's results");

// kRun tokens that begin at a multiple of kRun are in one page, and their numbers are in one range of bytes.
constexpr int kRun = 16;
constexpr int kTileRuns = kTileTokens > kRun ? kTileTokens / kRun : 1;
constexpr int kRunTokens = kTileTokens / kTileRuns;

// Heads whose outputs leave no registers for queries and scales.
constexpr bool kIsWide = HEAD_DIM > 128;

// Copy one run of a tile with cp.async, by a warp. block: the page's keys or values of one head. token: the run's
// first. Tokens at or after `end` are zeros in the tile, but in q8_0, where any byte is a number; see hide_scales.
__device__ __forceinline__ void copy_run(unsigned char* tile, int run, const unsigned char* block, int page_size,
                                         int token, int end) {
    const unsigned lane = threadIdx.x % 32, place = token & (page_size - 1);
    unsigned char* rows = tile + run * kRunTokens * kRowStride;
    constexpr int kPieces = kRunTokens * kRowPieces;
    // Whole rows at once: then all addresses are a constant apart.
    constexpr bool kWholeRows = 32 % kRowPieces == 0;
    const unsigned char* source = block + (place * kRowBytes + lane * 16);  // one sum of 64 bits
    unsigned char* target = rows + lane / kRowPieces * kRowStride + lane % kRowPieces * 16;
#pragma unroll
    for (int first = 0; first < kPieces; first += 32) {
        const int piece = first + int(lane), row = piece / kRowPieces;
        if (first + 32 > kPieces && piece >= kPieces) break;
        const int bytes = kKvHasScales || token + row < end ? 16 : 0;
        unsigned char* to = kWholeRows ? target + first / kRowPieces * kRowStride
                                       : rows + row * kRowStride + piece % kRowPieces * 16;
        cp_async_16(to, source + first * 16, bytes);
    }
    if (kKvHasScales && lane < kRunTokens * kScaleRowBytes / 16) {
        unsigned char* scales = tile + kTileTokens * kRowStride + run * kRunTokens * kScaleRowBytes;
        cp_async_16(scales + lane * 16, block + (page_size * kRowBytes + place * kScaleRowBytes + lane * 16));
    }
}

#if KV_DTYPE != 0

// Operands of the products: bf16 caches stay bf16; 8-bit numbers become fp16, which represents them exactly.
#if KV_DTYPE == 1
__device__ __forceinline__ unsigned pack_operands(float low, float high) { return pack_bf16x2(low, high); }
__device__ __forceinline__ void mma(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma_m16n8k16_bf16(acc, a, b0, b1);
}
#else
__device__ __forceinline__ unsigned pack_operands(float low, float high) { return pack_f16x2(low, high); }
__device__ __forceinline__ void mma(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma_m16n8k16_f16(acc, a, b0, b1);
}
#endif

// The first dimension in a lane's query registers. A step has 16 dimensions: registers 0 and 1 of the fragment hold the
// returned dimension of half = 0 and the next one, registers 2 and 3 those of half = 1. With 8-bit numbers, a lane's
// four bytes of a key are neighbours, so its query dimensions must be too; a product may use any order of dimensions.
__device__ __forceinline__ int query_dim(int step, int half) {
    const int j = threadIdx.x % 4;
    return 16 * step + (sizeof(Kv) == 2 ? 8 * half + 2 * j : 4 * j + 2 * half);
}

#if KV_DTYPE == 1

// keys[i]: b0 and b1 for the 16 dimensions of the step and the tile's tokens 8 i to 8 i + 7.
__device__ __forceinline__ void load_keys(unsigned (&keys)[kTileTokens / 8][2], const unsigned char* tile, int step) {
    const int lane = threadIdx.x % 32, token = lane % 8 + lane / 16 * 8;
    unsigned r[4];
    ldmatrix_x4(r, tile + token * kRowStride + step * 32 + lane / 8 % 2 * 16);
    keys[0][0] = r[0], keys[0][1] = r[1], keys[1][0] = r[2], keys[1][1] = r[3];
}

// values[k][n]: b0 and b1 for tokens 16 k to 16 k + 15 and the n-th 8 of the block's 16 dimensions; see output_dim.
__device__ __forceinline__ void load_values(unsigned (&values)[kTileTokens / 16][2][2], const unsigned char* tile,
                                            int block) {
    const int lane = threadIdx.x % 32;
    unsigned r[4];
    ldmatrix_x4_trans(r, tile + lane % 16 * kRowStride + block * 32 + lane / 16 * 16);
    values[0][0][0] = r[0], values[0][0][1] = r[1], values[0][1][0] = r[2], values[0][1][1] = r[3];
}

#else  // 8-bit numbers: 4 in a register, which become two pairs

#if KV_DTYPE == 2

// int8 numbers are multiplied without their scales: a key's scale multiplies the score of its block of dimensions, a
// value's the weight of its token. The two numbers that selector picks from four, plus kRaised: the byte, its sign
// flipped, in the low bits of 1024.
constexpr float kRaised = 1024.0f + 128.0f;
__device__ __forceinline__ unsigned raise(unsigned bytes, unsigned selector) {
    return prmt(bytes ^ 0x80808080u, 0x64646464u, selector);
}
__device__ __forceinline__ unsigned widen_value(unsigned bytes, unsigned selector) {
    return add_f16x2(raise(bytes, selector), 0xe480e480u);  // -kRaised: exact
}
// Keys stay raised, see WarpHeads::query_sums; but where heads are wide there are no registers for the sums.
__device__ __forceinline__ unsigned widen_key(unsigned bytes, unsigned selector) {
    return kIsWide ? widen_value(bytes, selector) : raise(bytes, selector);
}

constexpr unsigned kFirstTwo = 0x4140, kLastTwo = 0x4342, kEven = 0x4240, kOdd = 0x4341;

// Make the scales of tokens at or after `end` zeros, which may be NaN. The tile begins at `token`. The whole warp calls.
__device__ __forceinline__ void hide_scales(unsigned char* tile, int token, int end) {
    const int lane = threadIdx.x % 32;
    unsigned short* row = reinterpret_cast<unsigned short*>(tile + kTileTokens * kRowStride + lane * kScaleRowBytes);
    if (token + lane >= end)
        for (int i = 0; i < kScaleRowBytes / 2; ++i) row[i] = 0;
    __syncwarp();
}

// The scales of a tile, for the two tokens of each 8 whose scores and weights a lane has.
struct TileScales {
    static constexpr int kBlocks = HEAD_DIM / kQ8Block;
    const unsigned char* first_pair;
    unsigned words[kTileTokens / 8][kIsWide ? 1 : kBlocks];  // of the first token's blocks, then of the second's

    __device__ __forceinline__ explicit TileScales(const unsigned char* tile)
        : first_pair(tile + kTileTokens * kRowStride + threadIdx.x % 4 * 2 * kScaleRowBytes) {
        if constexpr (!kIsWide) {
#pragma unroll
            for (int i = 0; i < kTileTokens / 8; ++i) load(first_pair + 8 * i * kScaleRowBytes, words[i]);
        }
    }
    // Of one of the two tokens of the i-th 8.
    __device__ __forceinline__ unsigned short of_token(int i, int which, int block) const {
        const int place = which * kBlocks + block;
        if constexpr (kIsWide) {
            return reinterpret_cast<const unsigned short*>(first_pair + 8 * i * kScaleRowBytes)[place];
        } else {
            return static_cast<unsigned short>(words[i][place / 2] >> place % 2 * 16);
        }
    }
    // Of both, as one pair.
    __device__ __forceinline__ unsigned of_tokens(int i, int block) const {
        if constexpr (kIsWide) {
            return of_token(i, 0, block) | static_cast<unsigned>(of_token(i, 1, block)) << 16;
        } else {
            const int second = kBlocks + block;
            const unsigned selector = (block % 2 ? 0x32u : 0x10u) | (second % 2 ? 0x7600u : 0x5400u);
            return prmt(words[i][block / 2], words[i][second / 2], selector);
        }
    }

  private:
    template <int N> __device__ __forceinline__ static void load(const unsigned char* pair, unsigned (&words)[N]) {
        if constexpr (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const uint4 x = reinterpret_cast<const uint4*>(pair)[i / 4];
                words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) words[i] = reinterpret_cast<const unsigned*>(pair)[i];
        }
    }
};

#else

__device__ __forceinline__ unsigned widen_key(unsigned bytes, unsigned selector) {
    return e4m3x2_to_f16x2(static_cast<unsigned short>(prmt(bytes, 0, selector)));
}
__device__ __forceinline__ unsigned widen_value(unsigned bytes, unsigned selector) { return widen_key(bytes, selector); }

constexpr unsigned kFirstTwo = 0x10, kLastTwo = 0x32, kEven = 0x20, kOdd = 0x31;

#endif

__device__ __forceinline__ void load_keys(unsigned (&keys)[kTileTokens / 8][2], const unsigned char* tile, int step) {
    const int lane = threadIdx.x % 32;
    unsigned r[4];
    ldmatrix_x4(r, tile + lane * kRowStride + step * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        keys[i][0] = widen_key(r[i], kFirstTwo);
        keys[i][1] = widen_key(r[i], kLastTwo);
    }
}

// A transposed register has two dimensions of each of two tokens. Even dimensions form the first 8 of 16, odd
// dimensions the other 8.
__device__ __forceinline__ void load_values(unsigned (&values)[kTileTokens / 16][2][2], const unsigned char* tile,
                                            int block) {
    const int lane = threadIdx.x % 32;
    unsigned r[4];
    ldmatrix_x4_trans(r, tile + lane * kRowStride + block * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[i / 2][0][i % 2] = widen_value(r[i], kEven);
        values[i / 2][1][i % 2] = widen_value(r[i], kOdd);
    }
}

#endif

// The dimension of element e of an accumulator of values[..][n] of `block`. e is 0 or 1; elements 2 and 3 belong to
// another query.
__device__ __forceinline__ int output_dim(int block, int n, int e) {
    const int j = threadIdx.x % 4;
    return 16 * block + (sizeof(Kv) == 2 ? 8 * n + 2 * j + e : 4 * j + 2 * e + n);
}

#endif  // KV_DTYPE != 0

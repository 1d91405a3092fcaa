// Tiles of keys or values in shared memory: copying them there, and reading fragments of mma.m16n8k16 from them. A warp
// works on one tile at a time. Macros: KV_DTYPE, HEAD_DIM.

#pragma once

#include "values.cuh"

// One ldmatrix loads 16 dimensions: of 32 tokens with 8-bit numbers, of 16 tokens with 16-bit numbers.
constexpr int kTileTokens = 32 / int(sizeof(Kv));
constexpr int kRowBytes = HEAD_DIM * int(sizeof(Kv));
constexpr int kRowPieces = kRowBytes / 16;
// Rows that are read at once must begin in different banks. For ldmatrix, a row must be an odd number of pieces. The
// fp32 kernel reads half a row of banks from each of two tokens; there it must be 4 more than a multiple of 8.
constexpr int kRowStride = 16 * (sizeof(Kv) == 4 ? kRowPieces + (12 - kRowPieces % 8) % 8 : kRowPieces | 1);
constexpr int kScaleRowBytes = kKvHasScales ? HEAD_DIM / kQ8Block * int(sizeof(Fp16)) : 0;
constexpr int kTileBytes = kTileTokens * (kRowStride + kScaleRowBytes);  // rows, then all scales

// kRun tokens that begin at a multiple of kRun are in one page, and their numbers are in one range of bytes.
constexpr int kRun = 16;
constexpr int kTileRuns = kTileTokens > kRun ? kTileTokens / kRun : 1;
constexpr int kRunTokens = kTileTokens / kTileRuns;

// Copy one run of a tile with cp.async, by a warp. block: the page's keys or values of one head. token: the run's
// first. Tokens at or after `end` are not read; their numbers are zeros in the tile.
__device__ __forceinline__ void copy_run(unsigned char* tile, int run, const unsigned char* block, int page_size,
                                         int token, int end) {
    const int lane = threadIdx.x % 32, place = token & (page_size - 1);
    unsigned char* rows = tile + run * kRunTokens * kRowStride;
    const unsigned char* source = block + place * kRowBytes;
    constexpr int kPieces = kRunTokens * kRowPieces;
#pragma unroll
    for (int first = 0; first < kPieces; first += 32) {
        const int piece = first + lane, row = piece / kRowPieces;
        if (first + 32 > kPieces && piece >= kPieces) break;
        const int bytes = token + row < end ? 16 : 0;
        cp_async_16(rows + row * kRowStride + piece % kRowPieces * 16, source + piece * 16, bytes);
    }
    if (kKvHasScales && lane < kRunTokens * kScaleRowBytes / 16) {
        unsigned char* scales = tile + kTileTokens * kRowStride + run * kRunTokens * kScaleRowBytes;
        const int bytes = (end - token) * kScaleRowBytes - lane * 16;
        cp_async_16(scales + lane * 16, block + page_size * kRowBytes + place * kScaleRowBytes + lane * 16,
                    min(max(bytes, 0), 16));
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

// The two int8 numbers that selector picks from four, times the scales in the two halves.
__device__ __forceinline__ unsigned widen(unsigned bytes, unsigned selector, unsigned scales) {
    // As fp16: 1024 + 128 + the number, because the byte is in the low bits of 1024.
    const unsigned raised = prmt(bytes ^ 0x80808080u, 0x64646464u, selector);
    return mul_f16x2(add_f16x2(raised, 0xe480e480u), scales);  // -1152: exact
}

__device__ __forceinline__ unsigned scale_of(const unsigned char* tile, int token, int block) {
    const unsigned char* scales = tile + kTileTokens * kRowStride + token * kScaleRowBytes;
    return reinterpret_cast<const unsigned short*>(scales)[block / 2];
}

constexpr unsigned kFirstTwo = 0x4140, kLastTwo = 0x4342, kEven = 0x4240, kOdd = 0x4341;

#else

__device__ __forceinline__ unsigned widen(unsigned bytes, unsigned selector, unsigned) {
    return e4m3x2_to_f16x2(static_cast<unsigned short>(prmt(bytes, 0, selector)));
}

__device__ __forceinline__ unsigned scale_of(const unsigned char*, int, int) { return 0; }

constexpr unsigned kFirstTwo = 0x10, kLastTwo = 0x32, kEven = 0x20, kOdd = 0x31;

#endif

__device__ __forceinline__ void load_keys(unsigned (&keys)[kTileTokens / 8][2], const unsigned char* tile, int step) {
    const int lane = threadIdx.x % 32;
    unsigned r[4];
    ldmatrix_x4(r, tile + lane * kRowStride + step * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned scale = scale_of(tile, 8 * i + lane / 4, step) * 0x10001u;
        keys[i][0] = widen(r[i], kFirstTwo, scale);
        keys[i][1] = widen(r[i], kLastTwo, scale);
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
        const int token = 8 * i + lane % 4 * 2;
        const unsigned scales = scale_of(tile, token, block) | scale_of(tile, token + 1, block) << 16;
        values[i / 2][0][i % 2] = widen(r[i], kEven, scales);
        values[i / 2][1][i % 2] = widen(r[i], kOdd, scales);
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

// Macro: STREAM_ROWS, the most rows, 32 or 8: with 8 a block may go through many tiles (product_claims.cuh).
//
// The products of product_tiles.cuh for few rows, where reading the weights takes all the time: each lane streams its
// own weights through a ring in shared memory, begun before the kernel's input exists. Nothing in the loop waits for
// another lane, and no register holds weights that are still on their way.

#pragma once

#include "products/product_tiles.cuh"
#include "common/reduce.cuh"

#ifndef STREAM_ROWS
#define STREAM_ROWS 32
#endif

constexpr int kStreamThreads = 256;
// Of a multiprocessor; the ring's size allows them. Of blocks that claim tiles, fewer: the more each has, the more evenly
// they end.
constexpr int kStreamBlocks = TILE_OUTPUTS == 16 && STREAM_ROWS == 32 ? 3 : 2;
constexpr int kStreamRows = STREAM_ROWS;
constexpr int kRingChunks = 6;  // of each warp

constexpr int kStreamWarps = kStreamThreads / 32;
constexpr int kRingWords = kStreamWarps * kRingChunks * kLaneOutputs * 32;  // of 16 bytes
constexpr int kSumsOfWarp = kStreamRows * kSumStride;

static_assert(kStreamWarps * kSumsOfWarp * 4 <= kRingWords * 16, "the sums take the place of the ring");

template <class Weights> struct WeightStream {
    uint4* ring;  // of this lane: output i of chunk slot s at ring[(s * kLaneOutputs + i) * 32]
    Weights& weights;
    int num_chunks, next_chunk, copy_at, read_at;

    // Begins the first copies. All threads of the block call it.
    __device__ __forceinline__ WeightStream(uint4* shared, Weights& weights, int num_chunks)
        : ring(shared + (threadIdx.x / 32) * (kRingChunks * kLaneOutputs * 32) + threadIdx.x % 32), weights(weights),
          num_chunks(num_chunks), next_chunk(threadIdx.x / 32), copy_at(0), read_at(0) {
#pragma unroll
        for (int i = 0; i < kRingChunks - 1; ++i) copy();
    }

    // Hold the next chunk's weights.
    __device__ __forceinline__ void take() {
        cp_async_wait<kRingChunks - 2>();
#pragma unroll
        for (int i = 0; i < kLaneOutputs; ++i) weights.held[i] = ring[(read_at * kLaneOutputs + i) * 32];
        read_at = read_at + 1 == kRingChunks ? 0 : read_at + 1;
        copy();  // over the chunk before this one
    }

  private:
    __device__ __forceinline__ void copy() {
        if (next_chunk < num_chunks) {
            const int bytes = weights.num_bytes(next_chunk);
#pragma unroll
            for (int i = 0; i < kLaneOutputs; ++i) {
                const long long place = bytes > 0 ? (long long)(next_chunk) * kChunkBytes : 0;
                cp_async_16(ring + (copy_at * kLaneOutputs + i) * 32, weights.rows[i] + place, bytes);
            }
        }
        cp_async_commit();
        next_chunk += kStreamWarps;
        copy_at = copy_at + 1 == kRingChunks ? 0 : copy_at + 1;
    }
};

// Return the block's sums, float [kStreamWarps][kStreamRows][kSumStride], for num_rows rows of x [num_rows, inputs]. They
// are in the memory of the ring, shared [kRingWords]. begin() runs when the first weights are on their way and x may be
// read. inputs: a multiple of 8. All threads of the block call it.
template <class T, class Weights, class Begin>
__device__ __forceinline__ const float* stream_tile(uint4* shared, const T* x, Weights& weights, int num_rows,
                                                    int inputs, const Begin& begin) {
    constexpr int kTiles = kStreamRows / 8, kChunkInputs = Weights::kStepsHeld * kStepInputs;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_chunks = (inputs + kChunkInputs - 1) / kChunkInputs;
    WeightStream<Weights> stream(shared, weights, num_chunks);
    let_next_kernel_begin();
    wait_for_earlier_kernels();
    const auto row_of = [&](int chunk, int step, int tile) {
        const int row = tile * 8 + g, input = chunk * kChunkInputs + step * kStepInputs + t * 8;
        return row < num_rows && input < inputs ? *reinterpret_cast<const uint4*>(x + row * inputs + input)
                                                : make_uint4(0, 0, 0, 0);
    };
    // Rows are loaded a chunk ahead, for else each chunk waits for the L2 cache. Beside weights that are widened there
    // are no registers for that, and beside scales of groups none for all rows of a step at once.
    constexpr int kChunkAhead = Weights::kStepsHeld == 1 && !Weights::kHasGroups ? kTiles : 0;
    constexpr int kStepAhead = Weights::kHasGroups ? 0 : kTiles;
    uint4 next_rows[kTiles];
#pragma unroll
    for (int tile = 0; tile < kChunkAhead; ++tile) next_rows[tile] = row_of(warp, 0, tile);
    begin();
    float acc[kTiles][kMmaOutputs][4] = {};
    for (int chunk = warp; chunk < num_chunks; chunk += kStreamWarps) {
        weights.fetch_scales(chunk);
        stream.take();
#pragma unroll
        for (int step = 0; step < Weights::kStepsHeld; ++step) {
            uint4 of_rows[kTiles];
#pragma unroll
            for (int tile = 0; tile < kStepAhead; ++tile) {
                of_rows[tile] = tile < kChunkAhead ? next_rows[tile] : row_of(chunk, step, tile);
                if (tile < kChunkAhead) next_rows[tile] = row_of(chunk + kStreamWarps, 0, tile);
            }
            LaneWeights w;
            weights.read(w, step);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                if (tile * 8 >= num_rows) break;
                multiply_step<T>(acc[tile], w, weights, step, tile < kStepAhead ? of_rows[tile] : row_of(chunk, step, tile));
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();  // all weights have been read
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        if (tile * 8 >= num_rows) break;
#pragma unroll
        for (int m = 0; m < kMmaOutputs; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                sums[warp * kSumsOfWarp + (tile * 8 + 2 * t + e % 2) * kSumStride + 16 * m + g + e / 2 * 8] =
                    acc[tile][m][e];
    }
    __syncthreads();
    return sums;
}

__device__ __forceinline__ float sum_of(const float* sums, int row, int column) {
    float x = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kStreamWarps; ++warp) x += sums[warp * kSumsOfWarp + row * kSumStride + column];
    return x;
}

// Call use(row, column, is_present) for the tile's numbers. Whole groups of `columns` lanes have the same row; columns is
// a power of two, at most 32. Lanes beyond the last row call it too, because use may exchange numbers within a group.
template <class Use> __device__ __forceinline__ void for_each_sum(int num_rows, int columns, const Use& use) {
    const int rows_at_once = kStreamThreads / columns;
    for (int first = 0; first < num_rows; first += rows_at_once) {
        const int row = first + int(threadIdx.x) / columns;
        use(row, int(threadIdx.x) % columns, row < num_rows);
    }
}

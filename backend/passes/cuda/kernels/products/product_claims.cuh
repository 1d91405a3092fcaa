// Products whose blocks go through several tiles, which they claim two ahead: multiprocessors do not read equally fast. The
// stream of weights runs on from tile to tile. For up to 8 rows; with more, a block has one tile.

#pragma once

#include "products/product_stream.cuh"

#if STREAM_ROWS == 8
// WeightStream over tiles. tile_of(turn): number of the block's tile, at least num_tiles behind the last one.
template <class Weights, class WeightsOf, class TileOf> struct TileStream {
    uint4* ring;  // of this lane: output i of chunk slot s at ring[(s * kLaneOutputs + i) * 32]
    const WeightsOf& weights_of;
    const TileOf& tile_of;
    int num_tiles, num_chunks;
    const unsigned char* rows[kLaneOutputs];  // of the tile that is copied
    int next_chunk, turn = 0, copy_at = 0, read_at = 0;
    bool is_over = false;

    __device__ __forceinline__ TileStream(uint4* shared, const Weights& first, const WeightsOf& weights_of,
                                          const TileOf& tile_of, int num_tiles, int num_chunks)
        : ring(shared + (threadIdx.x / 32) * (kRingChunks * kLaneOutputs * 32) + threadIdx.x % 32),
          weights_of(weights_of), tile_of(tile_of), num_tiles(num_tiles), num_chunks(num_chunks),
          next_chunk(threadIdx.x / 32) {
#pragma unroll
        for (int i = 0; i < kLaneOutputs; ++i) rows[i] = first.rows[i];
#pragma unroll
        for (int i = 0; i < kRingChunks - 1; ++i) copy(first);
    }

    __device__ __forceinline__ void take(Weights& weights) {
        cp_async_wait<kRingChunks - 2>();
#pragma unroll
        for (int i = 0; i < kLaneOutputs; ++i) weights.held[i] = ring[(read_at * kLaneOutputs + i) * 32];
        read_at = read_at + 1 == kRingChunks ? 0 : read_at + 1;
        copy(weights);
    }

  private:
    __device__ __forceinline__ void copy(const Weights& weights) {
        if (next_chunk >= num_chunks && !is_over) {
            const int tile = tile_of(++turn);
            next_chunk = threadIdx.x / 32;
            is_over = tile >= num_tiles;
            if (!is_over) {
                const Weights next = weights_of(tile);
#pragma unroll
                for (int i = 0; i < kLaneOutputs; ++i) rows[i] = next.rows[i];
            }
        }
        if (!is_over) {
            const int bytes = weights.num_bytes(next_chunk);
#pragma unroll
            for (int i = 0; i < kLaneOutputs; ++i) {
                const long long place = bytes > 0 ? (long long)(next_chunk) * kChunkBytes : 0;
                cp_async_16(ring + (copy_at * kLaneOutputs + i) * 32, rows[i] + place, bytes);
            }
        }
        cp_async_commit();
        next_chunk += kStreamWarps;
        copy_at = copy_at + 1 == kRingChunks ? 0 : copy_at + 1;
    }
};
#endif

// Call use(tile, sums) for each of the block's tiles, with sums as of stream_tile. weights_of(tile): their weights.
// shared: the ring; then, with 8 rows, the sums of two tiles. With 8 rows, inputs fill kRingChunks - 1 chunks of each
// warp; claims is 0 before and after; there are at most as many blocks as tiles. The others as in stream_tile.
template <class T, class WeightsOf, class Begin, class Use>
__device__ __forceinline__ void stream_tiles(uint4* shared, const T* x, const WeightsOf& weights_of, int num_tiles,
                                             int num_rows, int inputs, unsigned* claims, const Begin& begin,
                                             const Use& use) {
    auto weights = weights_of(int(blockIdx.x));
#if STREAM_ROWS == 32
    use(int(blockIdx.x), stream_tile(shared, x, weights, num_rows, inputs, begin));
#else
    using Weights = decltype(weights);
    constexpr int kSteps = Weights::kStepsHeld, kChunkInputs = kSteps * kStepInputs;
    constexpr int kSums = kStreamWarps * kSumsOfWarp;
    __shared__ int tiles[4];  // from the third on
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_chunks = (inputs + kChunkInputs - 1) / kChunkInputs, num_blocks = int(gridDim.x);
    const auto tile_of = [&](int turn) { return turn < 2 ? int(blockIdx.x) + turn * num_blocks : tiles[turn % 4]; };
    TileStream<Weights, WeightsOf, decltype(tile_of)> stream(shared, weights, weights_of, tile_of, num_tiles, num_chunks);
    let_next_kernel_begin();
    wait_for_earlier_kernels();
    uint4 next_rows[kSteps];
    const auto load_rows = [&](int chunk) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int input = chunk * kChunkInputs + step * kStepInputs + t * 8;
            next_rows[step] = g < num_rows && input < inputs ? *reinterpret_cast<const uint4*>(x + g * inputs + input)
                                                             : make_uint4(0, 0, 0, 0);
        }
    };
    load_rows(warp);
    begin();
    for (int turn = 0;; ++turn) {
        const int tile = tile_of(turn);
        if (tile >= num_tiles) break;
        const bool has_next = tile_of(turn + 1) < num_tiles;
        unsigned claimed = 0;
        // A block claims once for each tile but its first: the last claim of all makes the counter 0 again.
        if (threadIdx.x == 0 && has_next) claimed = atomicInc(claims, unsigned(num_tiles - num_blocks - 1));
        if (turn > 0) weights = weights_of(tile);
        float acc[kMmaOutputs][4] = {};
        for (int chunk = warp; chunk < num_chunks; chunk += kStreamWarps) {
            weights.fetch_scales(chunk);
            stream.take(weights);
            uint4 of_rows[kSteps];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) of_rows[step] = next_rows[step];
            load_rows(chunk + kStreamWarps < num_chunks ? chunk + kStreamWarps : warp);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                LaneWeights w;
                weights.read(w, step);
                multiply_step<T>(acc, w, weights, step, of_rows[step]);
            }
        }
        float* sums = reinterpret_cast<float*>(shared + kRingWords) + turn % 2 * kSums;
#pragma unroll
        for (int m = 0; m < kMmaOutputs; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                sums[warp * kSumsOfWarp + (2 * t + e % 2) * kSumStride + 16 * m + g + e / 2 * 8] = acc[m][e];
        if (threadIdx.x == 0) tiles[(turn + 2) % 4] = has_next ? 2 * num_blocks + int(claimed) : num_tiles;
        __syncthreads();
        use(tile, sums);
    }
    cp_async_wait<0>();
#endif
}

// One block's tile of a product: out [rows, outputs] = x [rows, inputs] · weight [outputs, inputs], in 16-bit numbers
// by mma.m16n8k16. The weight is the left operand, so that a tile of few rows wastes little.
//
// A step covers 32 inputs, 8 neighbouring ones per lane of four: a lane reads them as one vector. The two matrix
// products of a step take four each. Which inputs a lane passes at which place does not matter, as long as weight and x
// agree. The warps of a block take turns with the inputs; their sums are added in the order of the warps. So a row has
// the same bits wherever it is in a tile, and whatever the others are.

#pragma once

#include "common/values.cuh"

#ifndef TILE_OUTPUTS
#define TILE_OUTPUTS 32
#endif

constexpr int kProductThreads = 128;
constexpr int kTileOutputs = TILE_OUTPUTS;  // 16 or 32
constexpr int kTileRows = 64;

constexpr int kProductWarps = kProductThreads / 32;
constexpr int kStepInputs = 32;
constexpr int kLaneOutputs = kTileOutputs / 8;
constexpr int kMmaOutputs = kTileOutputs / 16;  // matrix products side by side
constexpr int kSumStride = kTileOutputs + 4;  // 8 * lanes of four + lanes of eight: no bank conflicts
constexpr int kChunkBytes = 64;  // of an output's weights in one chunk, 16 for each lane of four

__device__ __forceinline__ void multiply_fragments(Bf16, float (&acc)[4], const unsigned (&a)[4], unsigned b0,
                                                   unsigned b1) {
    mma_m16n8k16_bf16(acc, a, b0, b1);
}
__device__ __forceinline__ void multiply_fragments(Fp16, float (&acc)[4], const unsigned (&a)[4], unsigned b0,
                                                   unsigned b1) {
    mma_m16n8k16_f16(acc, a, b0, b1);
}

// The weights of a lane: 8 inputs in each of its outputs, which are 8 apart.
struct LaneWeights {
    unsigned pairs[kLaneOutputs][4];
};

// The outputs of a tile: `first` and up, or half of them and as many that lie `skip` further. Beyond the last output
// they are the last one.
struct TileColumns {
    int first, outputs, skip;

    __device__ __forceinline__ int operator()(int column) const {
        return min(first + column + (column >= kTileOutputs / 2 ? skip : 0), outputs - 1);
    }
    // Output i of the lane.
    __device__ __forceinline__ int of_lane(int i) const { return (*this)(8 * i + int(threadIdx.x % 32) / 4); }
};

// A kind of weights has, for chunks of kStepsHeld steps: rows, where the lane's outputs begin; num_bytes(chunk), 16, or 0
// behind the last input; fetch(chunk), or held filled by others and fetch_scales(chunk); then read(weights, step) and, if
// groups of inputs have scales (kHasGroups), scale(i, step): that of output i of the lane in the step.

// Weights in the type of the activations.
template <class T> struct PlainWeights {
    static constexpr int kStepsHeld = 1;
    static constexpr bool kHasGroups = false;

    const unsigned char* rows[kLaneOutputs];
    int inputs;
    uint4 held[kLaneOutputs];

    // weight [outputs, inputs]
    __device__ __forceinline__ PlainWeights(const T* weight, const TileColumns& columns, int inputs) : inputs(inputs) {
#pragma unroll
        for (int i = 0; i < kLaneOutputs; ++i)
            rows[i] = reinterpret_cast<const unsigned char*>(weight + (long long)(columns.of_lane(i)) * inputs +
                                                             threadIdx.x % 4 * 8);
    }
    __device__ __forceinline__ int num_bytes(int chunk) const {
        return chunk * kStepInputs + int(threadIdx.x % 4) * 8 < inputs ? 16 : 0;
    }
    __device__ __forceinline__ void fetch(int chunk) {
        const bool is_inside = num_bytes(chunk) > 0;
#pragma unroll
        for (int i = 0; i < kLaneOutputs; ++i)
            held[i] = is_inside ? *reinterpret_cast<const uint4*>(rows[i] + (long long)(chunk) * kChunkBytes)
                                : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void fetch_scales(int) {}
    __device__ __forceinline__ void read(LaneWeights& w, int) const {
#pragma unroll
        for (int i = 0; i < kLaneOutputs; ++i)
            w.pairs[i][0] = held[i].x, w.pairs[i][1] = held[i].y, w.pairs[i][2] = held[i].z, w.pairs[i][3] = held[i].w;
    }
};

// Add a step's products of up to 8 rows: of_row are the lane's 8 inputs of its row.
template <class T, class Weights>
__device__ __forceinline__ void multiply_step(float (&acc)[kMmaOutputs][4], const LaneWeights& w,
                                              const Weights& weights, int step, const uint4& of_row) {
#pragma unroll
    for (int m = 0; m < kMmaOutputs; ++m) {
        const unsigned(&upper)[4] = w.pairs[2 * m], (&lower)[4] = w.pairs[2 * m + 1];
        const unsigned first[4] = {upper[0], lower[0], upper[1], lower[1]};
        const unsigned second[4] = {upper[2], lower[2], upper[3], lower[3]};
        if constexpr (Weights::kHasGroups) {
            float part[4] = {};
            multiply_fragments(T{}, part, first, of_row.x, of_row.y);
            multiply_fragments(T{}, part, second, of_row.z, of_row.w);
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][e] += part[e] * weights.scale(2 * m + e / 2, step);
        } else {
            multiply_fragments(T{}, acc[m], first, of_row.x, of_row.y);
            multiply_fragments(T{}, acc[m], second, of_row.z, of_row.w);
        }
    }
}

struct TileSums {
    float of_warp[kProductWarps][kTileRows][kSumStride];
};

// Fills sums for the tile's rows. source(row) is the row of x, for row < num_rows. inputs: a multiple of 8. All threads
// of the block call it; a barrier must follow before the sums are read.
template <class T, class Weights, class Source>
__device__ __forceinline__ void multiply_tile(TileSums& sums, const T* x, Weights& weights, const Source& source,
                                              int num_rows, int inputs) {
    constexpr int kTiles = kTileRows / 8, kChunkInputs = Weights::kStepsHeld * kStepInputs;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int sources[kTiles];
    float acc[kTiles][kMmaOutputs][4] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        const int row = tile * 8 + g;
        sources[tile] = row < num_rows ? source(row) : -1;
    }
    const int num_chunks = (inputs + kChunkInputs - 1) / kChunkInputs;
    for (int chunk = warp; chunk < num_chunks; chunk += kProductWarps) {
        weights.fetch(chunk);
#pragma unroll
        for (int step = 0; step < Weights::kStepsHeld; ++step) {
            const int input = chunk * kChunkInputs + step * kStepInputs + t * 8;
            LaneWeights w;
            weights.read(w, step);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                if (tile * 8 >= num_rows) break;
                uint4 of_row = make_uint4(0, 0, 0, 0);
                if (sources[tile] >= 0 && input < inputs)
                    of_row = *reinterpret_cast<const uint4*>(x + (long long)(sources[tile]) * inputs + input);
                multiply_step<T>(acc[tile], w, weights, step, of_row);
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        if (tile * 8 >= num_rows) break;
#pragma unroll
        for (int m = 0; m < kMmaOutputs; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                sums.of_warp[warp][tile * 8 + 2 * t + e % 2][16 * m + g + e / 2 * 8] = acc[tile][m][e];
    }
}

// Store the tile's rows: finish(sum, output) makes the number. out: row 0 of the tile. All threads call it after a
// barrier.
template <class T, class Finish>
__device__ __forceinline__ void store_tile(const TileSums& sums, T* out, int first, int outputs, int num_rows,
                                           const Finish& finish) {
    for (int item = threadIdx.x; item < num_rows * (kTileOutputs / 8); item += kProductThreads) {
        const int row = item / (kTileOutputs / 8), column = item % (kTileOutputs / 8) * 8, output = first + column;
        float x[8] = {};
#pragma unroll
        for (int warp = 0; warp < kProductWarps; ++warp) {
            float part[8];
            load8(&sums.of_warp[warp][row][column], part);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] += part[j];
        }
        T* at = out + (long long)(row) * outputs + output;
        if (outputs % 8 == 0 && output < outputs) {
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = finish(x[j], output + j);
            store8(at, x);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (output + j < outputs) at[j] = from_float<T>(finish(x[j], output + j));
        }
    }
}

// The products of a step of few rows, but that of q, k and v, with what stands before and behind them in a layer. Blocks:
// tiles of outputs. Dynamic shared memory: kRingWords of 16 bytes.

#include "rows/activations.cuh"
#include "products/row_weights.cuh"

#if STREAM_ROWS == 32
// The first norm of a step: hidden [rows, size] = residual [rows, size] fp32 * norm, squares [rows]. Blocks: rows.
extern "C" __global__ void __launch_bounds__(kStreamThreads, 4)
    weigh_rows(const float* __restrict__ residual, const float* __restrict__ norm, Act* __restrict__ hidden,
               float* __restrict__ squares, int size) {
    __shared__ float one_per_warp[kMaxWarps];
    const long long row = (long long)(blockIdx.x) * size;
    float sum = 0.0f;
    for (int column = threadIdx.x * 8; column < size; column += kStreamThreads * 8) {
        float x[8], weights[8];
        load8(residual + row + column, x);
        load8(norm + column, weights);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += x[j] * x[j], x[j] *= weights[j];
        store8(hidden + row + column, x);
    }
    sum = reduce_block(sum, one_per_warp, Sum{});
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
    let_next_kernel_begin();
}

// residual [rows, outputs] fp32 += the linear of x [rows, inputs]; then hidden [rows, outputs] = residual * norm, and
// squares [rows, tiles] are the tiles' sums of squares of the residual.
extern "C" __global__ void __launch_bounds__(kStreamThreads, 2)
    multiply_and_add(const Act* x, const unsigned char* __restrict__ values, const Scale* __restrict__ scales,
                     const unsigned char* __restrict__ zeros, const Act* __restrict__ bias, float* residual,
                     const float* __restrict__ norm, Act* hidden, float* squares, int num_rows, int outputs, int inputs,
                     int has_bias, float scale, int blocks) {
    extern __shared__ uint4 ring[];
    const RowLinear linear{values, scales, zeros, bias, outputs, inputs, has_bias, scale, blocks};
    const int first = blockIdx.x * kTileOutputs;
    StreamedWeights weights = linear.weights({first, outputs, 0});
    constexpr int kRowsAtOnce = kStreamThreads / kTileOutputs, kNumbers = kStreamRows / kRowsAtOnce;  // of a thread
    const int column = threadIdx.x % kTileOutputs, output = first + column;
    float addends[kNumbers];
    const auto load_addends = [&] {
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) {
            const int row = i * kRowsAtOnce + int(threadIdx.x) / kTileOutputs;
            addends[i] = row < num_rows && output < outputs ? residual[row * outputs + output] : 0.0f;
        }
    };
    constexpr bool kLoadsLate = StreamedWeights::kHasGroups;  // beside scales of groups there are no registers
    const float* sums = stream_tile(ring, x, weights, num_rows, inputs, [&] {
        if (!kLoadsLate) load_addends();
    });
    if (kLoadsLate) load_addends();
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
        if (i * kRowsAtOnce >= num_rows) break;
        const int row = i * kRowsAtOnce + int(threadIdx.x) / kTileOutputs;
        float y = 0.0f;
        if (row < num_rows && output < outputs) {
            const int at = row * outputs + output;
            y = addends[i] + linear.finish(sum_of(sums, row, column), 1.0f, output);
            residual[at] = y;
            hidden[at] = from_float<Act>(y * norm[output]);
        }
        const float square = reduce_lanes(y * y, kTileOutputs, Sum{});
        if (row < num_rows && column == 0) squares[row * gridDim.x + blockIdx.x] = square;
    }
}

#endif

// out [rows, width] = silu(gate) * up of the norm of x; the linear's outputs are [gate | up]. claims: see stream_tiles.
extern "C" __global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    multiply_and_gate(const Act* x, const float* squares, const unsigned char* __restrict__ values,
                      const Scale* __restrict__ scales, const unsigned char* __restrict__ zeros,
                      const Act* __restrict__ bias, Act* out, int num_rows, int width, int inputs, int num_parts,
                      float eps, unsigned* claims, int has_bias, float scale, int blocks) {
    extern __shared__ uint4 ring[];
    __shared__ float factors[kStreamRows];
    constexpr int kHalf = kTileOutputs / 2;
    const RowLinear linear{values, scales, zeros, bias, 2 * width, inputs, has_bias, scale, blocks};
    const WeighedRows rows{x, squares, num_parts, eps};
    stream_tiles(
        ring, x, [&](int tile) { return linear.weights({tile * kHalf, 2 * width, width - kHalf}); },
        (width + kHalf - 1) / kHalf, num_rows, inputs, claims, [&] { rows.find_factors(factors, num_rows, inputs); },
        [&](int tile, const float* sums) {
            for_each_sum(num_rows, kHalf, [&](int row, int column, bool is_present) {
                const int output = tile * kHalf + column;
                if (!is_present || output >= width) return;
                const float gate = linear.finish(sum_of(sums, row, column), factors[row], output);
                const float up = linear.finish(sum_of(sums, row, column + kHalf), factors[row], width + output);
                out[row * width + output] = from_float<Act>(Silu{}(gate) * up);
            });
        });
}

// out [rows, outputs] = the linear of x [rows, inputs].
extern "C" __global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    multiply_rows(const Act* x, const unsigned char* __restrict__ values, const Scale* __restrict__ scales,
                  const unsigned char* __restrict__ zeros, const Act* __restrict__ bias, Act* out, int num_rows,
                  int outputs, int inputs, unsigned* claims, int has_bias, float scale, int blocks) {
    extern __shared__ uint4 ring[];
    const RowLinear linear{values, scales, zeros, bias, outputs, inputs, has_bias, scale, blocks};
    stream_tiles(
        ring, x, [&](int tile) { return linear.weights({tile * kTileOutputs, outputs, 0}); },
        (outputs + kTileOutputs - 1) / kTileOutputs, num_rows, inputs, claims, [] {},
        [&](int tile, const float* sums) {
            for_each_sum(num_rows, kTileOutputs, [&](int row, int column, bool is_present) {
                const int output = tile * kTileOutputs + column;
                if (!is_present || output >= outputs) return;
                const float y = linear.finish(sum_of(sums, row, column), 1.0f, output);
                out[(long long)(row) * outputs + output] = from_float<Act>(y);
            });
        });
}

// Several residual streams (AltUp, arXiv 2301.13310): a layer predicts all, computes the first, and corrects the others by
// the result. Blocks: one for each row.

#include "rows/activations.cuh"
#include "common/reduce.cuh"
#include "common/values.cuh"
#include "step/step_tokens.cuh"

constexpr int kThreads = 256;
constexpr int kMaxStreams = 8;

// The row of the block: of token tokens[row], or row without tokens. rows [tokens][count][hidden].
__device__ __forceinline__ float* streams_of(float* rows, const int* tokens, int has_tokens, int count, int hidden) {
    const int row = blockIdx.x;
    return rows + (long long)(has_tokens ? tokens[row] : row) * count * hidden;
}

__device__ __forceinline__ float sum_of_block(float x) {
    __shared__ float one_per_warp[kMaxWarps];
    __syncthreads();  // all have read the sum before
    return reduce_block(x, one_per_warp, Sum{});
}

__device__ __forceinline__ float sum_of_squares(const float* x, int size) {
    float squares = 0.0f;
    for (int k = threadIdx.x; k < size; k += kThreads) squares = fmaf(x[k], x[k], squares);
    return sum_of_block(squares);
}

// factors[i] = offset + sum over j of weights[i][j] * tanh(router[j] · norm(x)), for i below n. router [count][hidden]:
// times the norm's weights, divided by hidden. All threads of the block call, and may read factors then.
__device__ __forceinline__ void route(const float* x, const float* router, const float* weights, int n, float offset,
                                      int count, int hidden, float eps, float* factors) {
    __shared__ float modes[kMaxStreams];
    const float scale = 1.0f / sqrtf(sum_of_squares(x, hidden) / float(hidden) + eps);
    for (int j = 0; j < count; ++j) {
        float dot = 0.0f;
        for (int k = threadIdx.x; k < hidden; k += kThreads) dot = fmaf(x[k], router[j * hidden + k], dot);
        dot = sum_of_block(dot);
        if (threadIdx.x == 0) modes[j] = tanhf(scale * dot);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kThreads) {
        float factor = offset;
        for (int j = 0; j < count; ++j) factor = fmaf(weights[i * count + j], modes[j], factor);
        factors[i] = factor;
    }
    __syncthreads();
}

// residual [n, hidden] becomes the prediction of the first stream. predictions [count][count][count].
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    predict_streams(float* rows, float* __restrict__ residual, const float* __restrict__ router,
                    const float* __restrict__ predictions, const int* __restrict__ tokens, int has_tokens, int count,
                    int hidden, float eps) {
    __shared__ float factors[kMaxStreams * kMaxStreams];
    float* const own = streams_of(rows, tokens, has_tokens, count, hidden);
    float* const first = residual + (long long)(blockIdx.x) * hidden;
    route(own, router, predictions, count * count, 0.0f, count, hidden, eps, factors);
    for (int k = threadIdx.x; k < hidden; k += kThreads) {
        float before[kMaxStreams];
#pragma unroll
        for (int j = 0; j < kMaxStreams; ++j) before[j] = j < count ? own[j * hidden + k] : 0.0f;
        for (int i = 0; i < count; ++i) {
            float x = own[i * hidden + k];
#pragma unroll
            for (int j = 0; j < kMaxStreams; ++j)
                if (j < count) x = fmaf(factors[i * count + j], before[j], x);
            own[i * hidden + k] = x;
            if (i == 0) first[k] = x;
        }
    }
}

// residual [n, hidden], a layer's result in place of the first stream, becomes what the layer's input is computed from.
// corrections [count][count]; scale [hidden].
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    correct_streams(float* rows, float* __restrict__ residual, const float* __restrict__ router,
                    const float* __restrict__ corrections, const float* __restrict__ scale,
                    const int* __restrict__ tokens, int has_tokens, int count, int hidden, float eps) {
    __shared__ float factors[kMaxStreams];
    float* const own = streams_of(rows, tokens, has_tokens, count, hidden);
    float* const result = residual + (long long)(blockIdx.x) * hidden;
    route(result, router, corrections, count, 1.0f, count, hidden, eps, factors);
    for (int k = threadIdx.x; k < hidden; k += kThreads) {
        const float change = result[k] - own[k];
        for (int i = 0; i < count; ++i) own[i * hidden + k] = fmaf(factors[i], change, own[i * hidden + k]);
        result[k] = own[k] * scale[k];
    }
}

// Adds rows [n, hidden] to all streams but the first.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    add_to_streams(float* rows, const float* __restrict__ added, const int* __restrict__ tokens, int has_tokens,
                   int count, int hidden) {
    float* const own = streams_of(rows, tokens, has_tokens, count, hidden);
    for (int k = threadIdx.x; k < hidden; k += kThreads) {
        const float x = added[(long long)(blockIdx.x) * hidden + k];
        for (int i = 1; i < count; ++i) own[i * hidden + k] += x;
    }
}

// The factor that gives projected rows [hidden] the size of the first stream, whose sum of squares is given.
__device__ __forceinline__ float factor_to_size(float first_squares, const Act* projected, int hidden) {
    float squares = 0.0f;
    for (int k = threadIdx.x; k < hidden; k += kThreads) {
        const float x = to_float(projected[k]);
        squares = fmaf(x, x, squares);
    }
    squares = sum_of_block(squares);
    return sqrtf(first_squares / float(hidden)) / sqrtf(fmaxf(squares / float(hidden), 1e-5f));
}

// projected [n, count - 1, hidden]: of the residual [n, hidden], with whose size they begin the streams after the first.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    begin_streams(float* rows, const float* __restrict__ residual, const Act* __restrict__ projected, int count,
                  int hidden) {
    float* const own = streams_of(rows, nullptr, 0, count, hidden);
    const float* const first = residual + (long long)(blockIdx.x) * hidden;
    const float squares = sum_of_squares(first, hidden);
    for (int k = threadIdx.x; k < hidden; k += kThreads) own[k] = first[k];
    for (int i = 1; i < count; ++i) {
        const Act* const x = projected + ((long long)(blockIdx.x) * (count - 1) + i - 1) * hidden;
        const float factor = factor_to_size(squares, x, hidden);
        for (int k = threadIdx.x; k < hidden; k += kThreads) own[i * hidden + k] = to_float(x[k]) * factor;
    }
}

// out [n, hidden]: a stream.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    take_stream(float* rows, Act* __restrict__ out, const int* __restrict__ tokens, int has_tokens, int stream,
                int count, int hidden) {
    const float* const own = streams_of(rows, tokens, has_tokens, count, hidden) + stream * hidden;
    for (int k = threadIdx.x; k < hidden; k += kThreads)
        out[(long long)(blockIdx.x) * hidden + k] = from_float<Act>(own[k]);
}

// residual [n, hidden] becomes the mean of the first stream and of the projections [n, hidden] of the others, in its
// size; stream by stream.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    end_stream(float* rows, float* __restrict__ residual, const Act* __restrict__ projected,
               const int* __restrict__ tokens, int has_tokens, int stream, int count, int hidden) {
    const float* const first = streams_of(rows, tokens, has_tokens, count, hidden);
    float* const mean = residual + (long long)(blockIdx.x) * hidden;
    const Act* const x = projected + (long long)(blockIdx.x) * hidden;
    const float part = 1.0f / float(count), factor = part * factor_to_size(sum_of_squares(first, hidden), x, hidden);
    for (int k = threadIdx.x; k < hidden; k += kThreads)
        mean[k] = fmaf(to_float(x[k]), factor, stream > 1 ? mean[k] : first[k] * part);
}

// gate_up [n, 2 * size], [gates | ups]: gates are reduced by their mean and `cutoff` standard deviations; what is left is
// activated, and multiplied by the ups, to out [n, size].
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    cut_gates(const Act* __restrict__ gate_up, Act* __restrict__ out, int size, float cutoff) {
    const Act* const gates = gate_up + (long long)(blockIdx.x) * 2 * size;
    float total = 0.0f, squares = 0.0f;
    for (int k = threadIdx.x; k < size; k += kThreads) total += to_float(gates[k]);
    const float mean = sum_of_block(total) / float(size);
    for (int k = threadIdx.x; k < size; k += kThreads) {
        const float off = to_float(gates[k]) - mean;
        squares = fmaf(off, off, squares);
    }
    const float least = mean + cutoff * sqrtf(sum_of_block(squares) / float(size));
    for (int k = threadIdx.x; k < size; k += kThreads) {
        const float gate = to_float(gates[k]), left = gate < least ? 0.0f : gate - least;  // keeps a NaN
        out[(long long)(blockIdx.x) * size + k] = from_float<Act>(GeluTanh{}(left) * to_float(gates[size + k]));
    }
}

// The ids of a step's tokens, 0 for what is not below num_ids: embeddings, padding and other tokens.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    resolve_ids(const int* __restrict__ input_ids, const int* __restrict__ last_tokens,
                const int* __restrict__ query_starts, const int* __restrict__ slots, int* __restrict__ out,
                int num_tokens, int num_rows, int num_ids) {
    const int number = blockIdx.x * kThreads + threadIdx.x;
    if (number >= num_tokens) return;
    const int id = token_to_embed(number, input_ids, last_tokens, query_starts, slots, num_rows);
    out[number] = id < 0 || id >= num_ids ? 0 : id;
}

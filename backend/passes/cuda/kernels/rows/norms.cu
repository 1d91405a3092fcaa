// Norms of rows: the RMS norm (arXiv 1910.07467) and the layer norm. One block per row.

#include "common/reduce.cuh"
#include "common/values.cuh"

constexpr int kChunksHeld = 2;  // chunks of 8 numbers in each thread's registers
constexpr int kSpanThreads = 256;

using Row = float[kChunksHeld][8];  // chunk i * blockDim.x + threadIdx.x in [i]

// Call function(i, first number of the chunk) for each of the thread's chunks.
template <class F> __device__ __forceinline__ void for_each_chunk(int hidden, const F& function) {
#pragma unroll
    for (int i = 0; i < kChunksHeld; ++i) {
        const int chunk = i * blockDim.x + threadIdx.x;
        if (chunk < hidden / 8) function(i, chunk * 8);
    }
}

template <class T> __device__ __forceinline__ void load_row(const T* row, int hidden, Row& x) {
    for_each_chunk(hidden, [&](int i, int at) { load8(row + at, x[i]); });
}

// The norm of a row. bias: of a layer norm only. The caller loads the weights before, so that their loads do not wait
// for the sum over the row.
template <bool kIsLayerNorm>
__device__ __forceinline__ void norm_row(Row& x, const Row& weights, const float* bias, int hidden, float eps) {
    __shared__ float one_per_warp[2][kMaxWarps];
    Row biases;
    if (kIsLayerNorm) {
        float total = 0.0f;
        for_each_chunk(hidden, [&](int i, int) {
#pragma unroll
            for (int j = 0; j < 8; ++j) total += x[i][j];
        });
        const float mean = reduce_block(total, one_per_warp[0], Sum{}) / float(hidden);
        for_each_chunk(hidden, [&](int i, int) {
#pragma unroll
            for (int j = 0; j < 8; ++j) x[i][j] -= mean;
        });
        load_row(bias, hidden, biases);
    }
    float squares = 0.0f;
    for_each_chunk(hidden, [&](int i, int) {
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += x[i][j] * x[i][j];
    });
    const float scale = 1.0f / sqrtf(reduce_block(squares, one_per_warp[1], Sum{}) / float(hidden) + eps);
    for_each_chunk(hidden, [&](int i, int) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[i][j] = x[i][j] * scale * weights[i][j];
            if (kIsLayerNorm) x[i][j] += biases[i][j];
        }
    });
}

// residual += delta, and the norm of the sum. All loads come before the first store, which they would wait for.
template <bool kIsLayerNorm>
__device__ __forceinline__ void add_and_norm(float* residual, const Act* delta, const float* weight, Act* out,
                                             int hidden, int has_delta, float eps) {
    const long long row = (long long)(blockIdx.x) * hidden;
    Row x, added, weights;
    load_row(residual + row, hidden, x);
    if (has_delta) load_row(delta + row, hidden, added);
    load_row(weight, hidden, weights);
    if (has_delta) {
        for_each_chunk(hidden, [&](int i, int at) {
#pragma unroll
            for (int j = 0; j < 8; ++j) x[i][j] += added[i][j];
            store8(residual + row + at, x[i]);
        });
    }
    norm_row<kIsLayerNorm>(x, weights, weight + hidden, hidden, eps);
    for_each_chunk(hidden, [&](int i, int at) { store8(out + row + at, x[i]); });
}

// residual [T, hidden] fp32, delta and out [T, hidden], weight [hidden]. hidden: a multiple of 8, at most
// 8 * kChunksHeld * blockDim.x; as for the next two.
extern "C" __global__ void __launch_bounds__(1024, 1)
    add_rms_norm(float* __restrict__ residual, const Act* __restrict__ delta, const float* __restrict__ weight,
                 Act* __restrict__ out, int hidden, int has_delta, float eps) {
    add_and_norm<false>(residual, delta, weight, out, hidden, has_delta, eps);
}

// weight [2 * hidden]: weight, then bias.
extern "C" __global__ void __launch_bounds__(1024, 1)
    add_layer_norm(float* __restrict__ residual, const Act* __restrict__ delta, const float* __restrict__ weight,
                   Act* __restrict__ out, int hidden, int has_delta, float eps) {
    add_and_norm<true>(residual, delta, weight, out, hidden, has_delta, eps);
}

// residual [T, hidden] fp32 += the RMS norm of added [T, hidden]. With has_factor the sum is multiplied by weight[hidden].
extern "C" __global__ void __launch_bounds__(1024, 1)
    rms_norm_added(float* __restrict__ residual, const Act* __restrict__ added, const float* __restrict__ weight,
                   int hidden, int has_factor, float eps) {
    const long long row = (long long)(blockIdx.x) * hidden;
    const float factor = has_factor ? weight[hidden] : 1.0f;
    Row x, weights, sum;
    load_row(added + row, hidden, x);
    load_row(weight, hidden, weights);
    load_row(residual + row, hidden, sum);
    norm_row<false>(x, weights, nullptr, hidden, eps);
    for_each_chunk(hidden, [&](int i, int at) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] = (sum[i][j] + x[i][j]) * factor;
        store8(residual + row + at, sum[i]);
    });
}

// The RMS norms of all heads of q together, and of all heads of k, in place. qkv [T, q_size + 2 * k_size]; weights
// [q_size] and [k_size]; sizes: multiples of 8. Blocks: x tokens, y 0 for q and 1 for k.
extern "C" __global__ void __launch_bounds__(kSpanThreads, 4)
    norm_q_and_k(Act* __restrict__ qkv, const float* __restrict__ q_weight, const float* __restrict__ k_weight,
                 int q_size, int k_size, float eps) {
    __shared__ float one_per_warp[kMaxWarps];
    const bool is_q = blockIdx.y == 0;
    const int size = is_q ? q_size : k_size;
    const float* weight = is_q ? q_weight : k_weight;
    Act* span = qkv + (long long)(blockIdx.x) * (q_size + 2 * k_size) + (is_q ? 0 : q_size);
    float x[8], squares = 0.0f;
    for (int column = threadIdx.x * 8; column < size; column += kSpanThreads * 8) {
        load8(span + column, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += x[j] * x[j];
    }
    const float scale = 1.0f / sqrtf(reduce_block(squares, one_per_warp, Sum{}) / float(size) + eps);
    for (int column = threadIdx.x * 8; column < size; column += kSpanThreads * 8) {
        float weights[8];
        load8(span + column, x);
        load8(weight + column, weights);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = x[j] * scale * weights[j];
        store8(span + column, x);
    }
}

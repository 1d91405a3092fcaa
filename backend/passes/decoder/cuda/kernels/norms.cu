// Norms of rows: the RMS norm (arXiv 1910.07467) and the layer norm. One block per row.

#include "reduce.cuh"
#include "values.cuh"

constexpr int kChunksHeld = 2;  // chunks of 8 numbers in each thread's registers
constexpr int kSpanThreads = 256;

// The norm of a row that the block holds in registers: chunk i * blockDim.x + threadIdx.x in x[i]. weight [hidden]; of a
// layer norm [weight | bias].
template <bool kIsLayerNorm>
__device__ __forceinline__ void norm_row(float (&x)[kChunksHeld][8], const float* weight, int hidden, float eps) {
    __shared__ float one_per_warp[2][kMaxWarps];
    const int num_chunks = hidden / 8;
    float mean = 0.0f;
    if (kIsLayerNorm) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunksHeld; ++i) {
            if (int(i * blockDim.x + threadIdx.x) >= num_chunks) break;
#pragma unroll
            for (int j = 0; j < 8; ++j) total += x[i][j];
        }
        mean = reduce_block(total, one_per_warp[0], Sum{}) / float(hidden);
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunksHeld; ++i) {
        if (int(i * blockDim.x + threadIdx.x) >= num_chunks) break;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (kIsLayerNorm) x[i][j] -= mean;
            squares += x[i][j] * x[i][j];
        }
    }
    const float scale = 1.0f / sqrtf(reduce_block(squares, one_per_warp[1], Sum{}) / float(hidden) + eps);
#pragma unroll
    for (int i = 0; i < kChunksHeld; ++i) {
        const int chunk = i * blockDim.x + threadIdx.x;
        if (chunk >= num_chunks) break;
        float weights[8];
        load8(weight + chunk * 8, weights);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] = x[i][j] * scale * weights[j];
        if (!kIsLayerNorm) continue;
        load8(weight + hidden + chunk * 8, weights);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] += weights[j];
    }
}

// residual += delta, and the norm of the sum.
template <bool kIsLayerNorm>
__device__ __forceinline__ void add_and_norm(float* residual, const Act* delta, const float* weight, Act* out,
                                             int hidden, int has_delta, float eps) {
    const long long row = (long long)(blockIdx.x) * hidden;
    const int num_chunks = hidden / 8;
    float x[kChunksHeld][8];
#pragma unroll
    for (int i = 0; i < kChunksHeld; ++i) {
        const int chunk = i * blockDim.x + threadIdx.x;
        if (chunk >= num_chunks) break;
        load8(residual + row + chunk * 8, x[i]);
        if (!has_delta) continue;
        float added[8];
        load8(delta + row + chunk * 8, added);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] += added[j];
        store8(residual + row + chunk * 8, x[i]);
    }
    norm_row<kIsLayerNorm>(x, weight, hidden, eps);
#pragma unroll
    for (int i = 0; i < kChunksHeld; ++i) {
        const int chunk = i * blockDim.x + threadIdx.x;
        if (chunk >= num_chunks) break;
        store8(out + row + chunk * 8, x[i]);
    }
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

// residual [T, hidden] fp32 += the RMS norm of added [T, hidden].
extern "C" __global__ void __launch_bounds__(1024, 1)
    rms_norm_added(float* __restrict__ residual, const Act* __restrict__ added, const float* __restrict__ weight,
                   int hidden, float eps) {
    const long long row = (long long)(blockIdx.x) * hidden;
    const int num_chunks = hidden / 8;
    float x[kChunksHeld][8];
#pragma unroll
    for (int i = 0; i < kChunksHeld; ++i) {
        const int chunk = i * blockDim.x + threadIdx.x;
        if (chunk >= num_chunks) break;
        load8(added + row + chunk * 8, x[i]);
    }
    norm_row<false>(x, weight, hidden, eps);
#pragma unroll
    for (int i = 0; i < kChunksHeld; ++i) {
        const int chunk = i * blockDim.x + threadIdx.x;
        if (chunk >= num_chunks) break;
        float sum[8];
        load8(residual + row + chunk * 8, sum);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += x[i][j];
        store8(residual + row + chunk * 8, sum);
    }
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

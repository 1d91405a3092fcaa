// residual += delta, and the RMS norm of the sum (arXiv 1910.07467). One block per row, which it keeps in registers.

#include "reduce.cuh"
#include "values.cuh"

constexpr int kChunksHeld = 2;  // chunks of 8 numbers in each thread's registers

// residual [T, hidden] fp32, delta and out [T, hidden], weight [hidden]. hidden: a multiple of 8, at most
// 8 * kChunksHeld * blockDim.x.
extern "C" __global__ void __launch_bounds__(1024, 1)
    add_rms_norm(float* __restrict__ residual, const Act* __restrict__ delta, const float* __restrict__ weight,
                 Act* __restrict__ out, int hidden, int has_delta, float eps) {
    __shared__ float one_per_warp[kMaxWarps];
    const long long row = (long long)(blockIdx.x) * hidden;
    const int num_chunks = hidden / 8;
    float x[kChunksHeld][8];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunksHeld; ++i) {
        const int chunk = i * blockDim.x + threadIdx.x;
        if (chunk >= num_chunks) break;
        load8(residual + row + chunk * 8, x[i]);
        if (has_delta) {
            float added[8];
            load8(delta + row + chunk * 8, added);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[i][j] += added[j];
            store8(residual + row + chunk * 8, x[i]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += x[i][j] * x[i][j];
    }
    const float scale = 1.0f / sqrtf(reduce_block(squares, one_per_warp, Sum{}) / float(hidden) + eps);
#pragma unroll
    for (int i = 0; i < kChunksHeld; ++i) {
        const int chunk = i * blockDim.x + threadIdx.x;
        if (chunk >= num_chunks) break;
        float weights[8];
        load8(weight + chunk * 8, weights);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] = x[i][j] * scale * weights[j];
        store8(out + row + chunk * 8, x[i]);
    }
}

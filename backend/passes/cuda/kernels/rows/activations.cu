// Activations. Gated: out = f(gate) * up, where gate_up is [T, 2 * size], [gate | up] in each row, and out [T, size].

#include "rows/activations.cuh"
#include "common/values.cuh"

constexpr int kThreads = 128;

// Blocks: x rows, y chunks of 8 numbers, one chunk per thread. size: a multiple of 8.
template <class F>
__device__ __forceinline__ void gate(const Act* gate_up, Act* out, int size, const F& activation) {
    const int column = (blockIdx.y * kThreads + threadIdx.x) * 8;
    if (column >= size) return;
    const Act* row = gate_up + (long long)(blockIdx.x) * 2 * size;
    float x[8], up[8];
    load8(row + column, x);
    load8(row + size + column, up);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = activation(x[j]) * up[j];
    store8(out + (long long)(blockIdx.x) * size + column, x);
}

extern "C" __global__ void __launch_bounds__(kThreads, 8)
    silu_mul(const Act* __restrict__ gate_up, Act* __restrict__ out, int size) {
    gate(gate_up, out, size, Silu{});
}

extern "C" __global__ void __launch_bounds__(kThreads, 8)
    gelu_mul(const Act* __restrict__ gate_up, Act* __restrict__ out, int size) {
    gate(gate_up, out, size, GeluTanh{});
}

// out [T, size] *= sigmoid(gates), of which rows are row_size apart.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
    sigmoid_mul(const Act* __restrict__ gates, Act* __restrict__ out, int size, int row_size) {
    const int column = (blockIdx.y * kThreads + threadIdx.x) * 8;
    if (column >= size) return;
    Act* const place = out + (long long)(blockIdx.x) * size + column;
    float x[8], y[8];
    load8(gates + (long long)(blockIdx.x) * row_size + column, x);
    load8(place, y);
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] /= 1.0f + expf(-x[j]);
    store8(place, y);
}

// gates [n, size] = gelu(gates) * inputs, of which rows are row_size apart. Row i takes row tokens[i] of inputs, or i
// without tokens.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
    gelu_mul_input(Act* __restrict__ gates, const float* __restrict__ inputs, const int* __restrict__ tokens, int size,
                   int row_size, int has_tokens) {
    const int column = (blockIdx.y * kThreads + threadIdx.x) * 8, token = has_tokens ? tokens[blockIdx.x] : int(blockIdx.x);
    if (column >= size) return;
    Act* const place = gates + (long long)(blockIdx.x) * size + column;
    float x[8], y[8];
    load8(inputs + (long long)(token) * row_size + column, x);
    load8(place, y);
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = GeluTanh{}(y[j]) * x[j];
    store8(place, y);
}

// x and out [T, size].
extern "C" __global__ void __launch_bounds__(kThreads, 8)
    gelu(const Act* __restrict__ x, Act* __restrict__ out, int size) {
    const int column = (blockIdx.y * kThreads + threadIdx.x) * 8;
    if (column >= size) return;
    const long long start = (long long)(blockIdx.x) * size + column;
    float y[8];
    load8(x + start, y);
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = GeluTanh{}(y[j]);
    store8(out + start, y);
}

// Rows of activations as 8-bit numbers for the library's products, and what turns its sums of integers into results.
// Macros: ACT; E4M3, whether the numbers are floats or integers.

#include "common/reduce.cuh"
#include "common/values.cuh"

constexpr int kRowThreads = 128;
constexpr int kChunkInputs = 64;  // as of 8-bit weights in quantised_weights.cuh
constexpr float kSmallestPeak = 1e-30f;  // a row of smaller numbers counts as zeros

#if E4M3
using Number = Fp8;
constexpr float kLargestNumber = 448.0f;
#else
using Number = Q8;
constexpr float kLargestNumber = 127.0f;
#endif

// rows [T, width]: x [T, inputs] / scale, rounded, in the order of inputs that 8-bit weights have, zeros behind the
// last. scales [T]: the row's largest magnitude / kLargestNumber; NaN if a number is not finite. inputs: a multiple of 8;
// width: of kChunkInputs. Blocks: x rows.
extern "C" __global__ void __launch_bounds__(kRowThreads, 8)
    round_rows(const Act* __restrict__ x, unsigned char* __restrict__ rows, float* __restrict__ scales, int inputs,
               int width) {
    __shared__ unsigned one_per_warp[kMaxWarps];
    const Act* row = x + (long long)(blockIdx.x) * inputs;
    float numbers[8];
    unsigned bits = 0;  // of the largest magnitude: they grow with it, and those of infinity and NaN are larger
    for (int input = threadIdx.x * 8; input < inputs; input += kRowThreads * 8) {
        load8(row + input, numbers);
#pragma unroll
        for (int j = 0; j < 8; ++j) bits = max(bits, __float_as_uint(numbers[j]) & 0x7fffffffu);
    }
    bits = reduce_block(bits, one_per_warp, Largest{});
    const float peak = __uint_as_float(bits);
    const bool is_finite = bits < 0x7f800000u, is_usable = is_finite && peak >= kSmallestPeak;
    const float factor = is_usable ? kLargestNumber / peak : 0.0f;
    if (threadIdx.x == 0)
        scales[blockIdx.x] = is_usable ? peak / kLargestNumber : is_finite ? 0.0f : __uint_as_float(0x7fffffffu);
    unsigned char* mine = rows + (long long)(blockIdx.x) * width;
    for (int input = threadIdx.x * 8; input < width; input += kRowThreads * 8) {
        if (is_usable && input < inputs) {
            load8(row + input, numbers);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) numbers[j] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) numbers[j] = E4M3 ? numbers[j] * factor : rintf(numbers[j] * factor);
        const int chunk = input / kChunkInputs, step = input % kChunkInputs / 32, lane = input % 32 / 8;
        store8(reinterpret_cast<Number*>(mine + chunk * kChunkInputs + lane * 16 + step * 8), numbers);
    }
}

#if !E4M3
// out [T, outputs], from column `first`: (sums [T, count] × the row's and the output's scale + bias) × scale. count and
// outputs: multiples of 8. Blocks: x rows, y chunks of 8 columns, one per thread.
extern "C" __global__ void __launch_bounds__(kRowThreads, 8)
    scale_sums(const int* __restrict__ sums, const float* __restrict__ row_scales, const float* __restrict__ scales,
               const Act* __restrict__ bias, Act* __restrict__ out, int first, int count, int outputs, int has_bias,
               float scale) {
    const int column = (blockIdx.y * kRowThreads + threadIdx.x) * 8;
    if (column >= count) return;
    const int* at = sums + (long long)(blockIdx.x) * count + column;
    const float of_row = row_scales[blockIdx.x];
    float of_output[8], biases[8] = {}, numbers[8];
    load8(scales + first + column, of_output);
    if (has_bias) load8(bias + first + column, biases);
#pragma unroll
    for (int j = 0; j < 8; ++j) numbers[j] = (float(at[j]) * of_row * of_output[j] + biases[j]) * scale;
    store8(out + (long long)(blockIdx.x) * outputs + first + column, numbers);
}
#endif

// Reading a row of logits 8 at a time, and floats as integers of the same order.

#pragma once

#include "values.cuh"

// Load N times the logits of 8 tokens, the first of them first + i * stride; -inf past the vocabulary. first and stride
// are multiples of 8. Rows may have any alignment.
template <int N>
__device__ __forceinline__ void load_logits(const Act* row, int vocab_size, int first, int stride, float (&x)[N][8]) {
    if (reinterpret_cast<unsigned long long>(row) % 16 == 0 && first + (N - 1) * stride + 8 <= vocab_size) {
#pragma unroll
        for (int i = 0; i < N; ++i) load8(row + first + i * stride, x[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int token = first + i * stride + j;
            x[i][j] = token < vocab_size ? to_float(row[token]) : -infinity();
        }
}
__device__ __forceinline__ void load_logits(const Act* row, int vocab_size, int first, float (&x)[8]) {
    float one[1][8];
    load_logits(row, vocab_size, first, 0, one);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = one[0][j];
}

// The largest of 8 numbers; NaN if one of them is.
__device__ __forceinline__ float largest_of(const float (&x)[8]) {
    float top = x[0];
#pragma unroll
    for (int j = 1; j < 8; ++j) top = max_or_nan(top, x[j]);
    return top;
}

constexpr unsigned kNotANumber = 0xffffffffu;

// An integer that is larger for larger numbers, and largest for NaN.
__device__ __forceinline__ unsigned order_of(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return kNotANumber;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(unsigned order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Encodes a score and its token so that the larger score wins, and the lower token among equal scores. 0 is less than
// any candidate.
__device__ __forceinline__ unsigned long long candidate(float score, int token) {
    return (unsigned long long)(order_of(score)) << 32 | ~unsigned(token);
}
__device__ __forceinline__ int token_of(unsigned long long best) { return int(~unsigned(best)); }
__device__ __forceinline__ float score_of(unsigned long long best) { return number_of(unsigned(best >> 32)); }

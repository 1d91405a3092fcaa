// Reading a row of logits 8 at a time, and floats as integers of the same order.

#pragma once

#include "values.cuh"

// Load the logits of tokens first to first + 7; -inf past the vocabulary. first is a multiple of 8. Rows may have any
// alignment.
__device__ __forceinline__ void load_logits(const Act* row, int vocab_size, int first, float (&x)[8]) {
    if (reinterpret_cast<unsigned long long>(row) % 16 == 0 && first + 8 <= vocab_size) {
        load8(row + first, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = first + j < vocab_size ? to_float(row[first + j]) : -infinity();
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

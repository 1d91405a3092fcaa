// A row of logits 8 at a time, and numbers ordered as integers.

#pragma once

#include "values.cuh"

// Of tokens first … first + 7, a multiple of 8; -inf past the vocabulary. Rows may begin anywhere.
__device__ __forceinline__ void load_logits(const Act* row, int vocab_size, int first, float (&x)[8]) {
    if (reinterpret_cast<unsigned long long>(row) % 16 == 0 && first + 8 <= vocab_size) {
        load8(row + first, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = first + j < vocab_size ? to_float(row[first + j]) : -infinity();
}

constexpr unsigned kNotANumber = 0xffffffffu;

// Larger for larger numbers; of NaN largest of all.
__device__ __forceinline__ unsigned order_of(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return kNotANumber;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(unsigned order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// The largest wins; of equal scores the lowest token. 0 is less than any.
__device__ __forceinline__ unsigned long long candidate(float score, int token) {
    return (unsigned long long)(order_of(score)) << 32 | ~unsigned(token);
}
__device__ __forceinline__ int token_of(unsigned long long best) { return int(~unsigned(best)); }
__device__ __forceinline__ float score_of(unsigned long long best) { return number_of(unsigned(best >> 32)); }

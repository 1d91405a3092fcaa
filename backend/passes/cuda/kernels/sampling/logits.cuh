// Reading a row of logits 8 at a time, and floats as integers of the same order.

#pragma once

#include "common/values.cuh"

// The logits of 8 tokens as they lie in memory, so that those on their way take few registers.
template <class T> struct Logits8 {
    uint4 pairs;

    __device__ __forceinline__ void load(const T* p) { pairs = *reinterpret_cast<const uint4*>(p); }
    __device__ __forceinline__ void pack_from(const float (&x)[8]) {
        pairs = make_uint4(pack(T{}, x[0], x[1]), pack(T{}, x[2], x[3]), pack(T{}, x[4], x[5]), pack(T{}, x[6], x[7]));
    }
    __device__ __forceinline__ void unpack_to(float (&x)[8]) const {
        unpack(T{}, pairs.x, x[0], x[1]);
        unpack(T{}, pairs.y, x[2], x[3]);
        unpack(T{}, pairs.z, x[4], x[5]);
        unpack(T{}, pairs.w, x[6], x[7]);
    }
};
template <> struct Logits8<float> {
    float numbers[8];

    __device__ __forceinline__ void load(const float* p) { load8(p, numbers); }
    __device__ __forceinline__ void pack_from(const float (&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) numbers[j] = x[j];
    }
    __device__ __forceinline__ void unpack_to(float (&x)[8]) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = numbers[j];
    }
};

// Load N times the logits of 8 tokens, the first of them first + i * stride; -inf past the vocabulary. first and stride
// are multiples of 8. Rows may have any alignment.
template <int N>
__device__ __forceinline__ void load_logits(const Act* row, int vocab_size, int first, int stride,
                                            Logits8<Act> (&x)[N]) {
    if (reinterpret_cast<unsigned long long>(row) % 16 == 0 && first + (N - 1) * stride + 8 <= vocab_size) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i].load(row + first + i * stride);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float some[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int token = first + i * stride + j;
            some[j] = token < vocab_size ? to_float(row[token]) : -infinity();
        }
        x[i].pack_from(some);
    }
}
__device__ __forceinline__ void load_logits(const Act* row, int vocab_size, int first, float (&x)[8]) {
    Logits8<Act> one[1];
    load_logits(row, vocab_size, first, 0, one);
    one[0].unpack_to(x);
}

// The largest of 8 numbers; NaN if one of them is.
__device__ __forceinline__ float largest_of(const float (&x)[8]) {
    float top = x[0];
#pragma unroll
    for (int j = 1; j < 8; ++j) top = max_or_nan(top, x[j]);
    return top;
}

// The first place of x that has this number.
__device__ __forceinline__ int place_of(float number, const float (&x)[8]) {
    int place = 0;
#pragma unroll
    for (int j = 7; j >= 0; --j) place = x[j] == number ? j : place;
    return place;
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

// Weights of 4 or 8 bits as LaneWeights; see product_tiles.cuh. Macros: ACT; WEIGHT, the bits; FLOAT, whether they are a
// float, E2M1 or E4M3; GROUP, the inputs that share a scale, and of 4-bit integers a zero point, or 0.
// ops/packed_weights.py packs them.
//
// A row of values has one chunk after the other, of 64 (8 bits) or 128 inputs (4 bits), 64 bytes each: 16 bytes for each
// lane of four, and in these the lane's 8 inputs of each step. The last chunk is filled up. Of 8 inputs with 4 bits,
// number i has bits 4 (i / 2) and up if i is even, and 16 + 4 (i / 2) and up if it is odd.

#pragma once

#include "product_tiles.cuh"

constexpr bool kHasZeros = WEIGHT == 4 && !FLOAT;

#if WEIGHT == 4 && FLOAT
struct E8m0 {  // 2^(exponent - 127); exponents from 1 to 254
    unsigned char exponent;
};
__device__ __forceinline__ float to_float(E8m0 x) { return __uint_as_float(unsigned(x.exponent) << 23); }
using Scale = E8m0;
#elif WEIGHT == 4
using Scale = Fp16;
#elif WEIGHT == 8
using Scale = float;
#else
#error "WEIGHT is 4 or 8"
#endif

constexpr int kRowChunkBytes = 64;
constexpr int kRowChunkInputs = kRowChunkBytes * 8 / WEIGHT;

// [outputs, inputs] of w = scale * (value - zero). Scales and zeros [outputs, groups], or without groups scales
// [outputs]; the last chunk has all its groups. Only integers of 4 bits have zeros; those of 8 bits are signed.
struct PackedWeights {
    const unsigned char* values;
    const Scale* scales;
    const unsigned char* zeros;
    int inputs;

    __device__ __forceinline__ int num_chunks() const { return (inputs + kRowChunkInputs - 1) / kRowChunkInputs; }
    __device__ __forceinline__ const unsigned char* row(long long output) const {
        return values + output * num_chunks() * kRowChunkBytes;
    }
#if GROUP
    __device__ __forceinline__ int num_groups() const { return (num_chunks() * kRowChunkInputs + GROUP - 1) / GROUP; }
#endif
};

// Four 4-bit values of each half of pairs, less their zero point.
__device__ __forceinline__ unsigned subtract_zero(Bf16, unsigned pair, unsigned zero) {
    return add_bf16x2(pair | 0x43004300u, 0xc300c300u + zero * 0x10001u);  // 128 + value - (128 + zero)
}
__device__ __forceinline__ unsigned subtract_zero(Fp16, unsigned pair, unsigned zero) {
    return add_f16x2(pair | 0x64006400u, 0xe400e400u + zero * 0x10001u);  // 1024 + value - (1024 + zero)
}

// pair: two signed bytes, in the low byte of each half.
__device__ __forceinline__ unsigned widen_bytes(Bf16, unsigned pair) {
    // 128 + the low 7 bits, less 128, or 256 if the sign is set.
    return add_bf16x2((pair & 0x007f007fu) | 0x43004300u, (pair & 0x00800080u) | 0xc300c300u);
}
__device__ __forceinline__ unsigned widen_bytes(Fp16, unsigned pair) {
    return add_f16x2((pair ^ 0x00800080u) | 0x64006400u, 0xe480e480u);  // 1024 + (value + 128) - 1152
}

// pair: two E2M1 numbers, in the low bits of each half. Shifted into place they are too small: the exponent biases are 1,
// and 127 or 15.
__device__ __forceinline__ unsigned widen_e2m1(Bf16, unsigned pair) {
    return mul_bf16x2((pair & 0x00070007u) << 6 | (pair & 0x00080008u) << 12, 0x7e807e80u);  // 2^126
}
__device__ __forceinline__ unsigned widen_e2m1(Fp16, unsigned pair) {
    return mul_f16x2((pair & 0x00070007u) << 9 | (pair & 0x00080008u) << 12, 0x74007400u);  // 2^14
}

__device__ __forceinline__ void widen_word(unsigned word, unsigned zero, unsigned (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned pair = word >> (4 * i) & 0x000f000fu;
        pairs[i] = kHasZeros ? subtract_zero(Act{}, pair, zero) : widen_e2m1(Act{}, pair);
    }
}
__device__ __forceinline__ unsigned widen_floats(Fp16, unsigned pair) {
    return e4m3x2_to_f16x2(static_cast<unsigned short>(pair));
}
__device__ __forceinline__ unsigned widen_floats(Bf16, unsigned pair) {
    float low, high;
    unpack(Fp16{}, widen_floats(Fp16{}, pair), low, high);
    return pack_bf16x2(low, high);
}

__device__ __forceinline__ void widen_words(unsigned low, unsigned high, unsigned (&pairs)[4]) {
#if FLOAT
    pairs[0] = widen_floats(Act{}, low & 0xffffu);
    pairs[1] = widen_floats(Act{}, low >> 16);
    pairs[2] = widen_floats(Act{}, high & 0xffffu);
    pairs[3] = widen_floats(Act{}, high >> 16);
#else
    pairs[0] = widen_bytes(Act{}, prmt(low, 0, 0x4140));
    pairs[1] = widen_bytes(Act{}, prmt(low, 0, 0x4342));
    pairs[2] = widen_bytes(Act{}, prmt(high, 0, 0x4140));
    pairs[3] = widen_bytes(Act{}, prmt(high, 0, 0x4342));
#endif
}

struct QuantisedWeights {
    static constexpr int kStepsHeld = kRowChunkInputs / kStepInputs;
    static constexpr bool kHasGroups = GROUP != 0;

    const unsigned char* rows[4];
    uint4 held[4];

    __device__ __forceinline__ static unsigned word(const uint4& x, int i) {
        return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
    }

#if GROUP
    static constexpr int kGroupsHeld = kRowChunkInputs > GROUP ? kRowChunkInputs / GROUP : 1;

    const Scale* scale_rows[4];
    float scales[4][kGroupsHeld];
#endif
#if WEIGHT == 4
    const unsigned char* zero_rows[4];
    unsigned zeros[4][kGroupsHeld] = {};
#endif

    // first: the tile's first output, of `outputs`; output 0 is row `before` of the weights.
    __device__ __forceinline__ QuantisedWeights(const PackedWeights& weights, int first, int outputs,
                                                long long before) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const long long output = before + min(first + 8 * i + lane / 4, outputs - 1);
            rows[i] = weights.row(output) + lane % 4 * 16;
#if GROUP
            scale_rows[i] = weights.scales + output * weights.num_groups();
#endif
#if WEIGHT == 4
            zero_rows[i] = weights.zeros + output * weights.num_groups();
#endif
        }
    }
    __device__ __forceinline__ void fetch(int chunk) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            held[i] = *reinterpret_cast<const uint4*>(rows[i] + (long long)(chunk) * kRowChunkBytes);
#if GROUP
            const int first = chunk * kRowChunkInputs / GROUP;
#pragma unroll
            for (int group = 0; group < kGroupsHeld; ++group) {
                scales[i][group] = to_float(scale_rows[i][first + group]);
#if WEIGHT == 4
                if constexpr (kHasZeros) zeros[i][group] = zero_rows[i][first + group];
#endif
            }
#endif
        }
    }
    __device__ __forceinline__ void read(LaneWeights& w, int step) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#if WEIGHT == 4
            widen_word(word(held[i], step), zeros[i][step * kStepInputs / GROUP], w.pairs[i]);
#else
            widen_words(word(held[i], 2 * step), word(held[i], 2 * step + 1), w.pairs[i]);
#endif
        }
    }
#if GROUP
    __device__ __forceinline__ float scale(int i, int step) const { return scales[i][step * kStepInputs / GROUP]; }
#endif
};

// 8 inputs of an output, from a multiple of 8.
__device__ __forceinline__ void dequantise8(const PackedWeights& weights, long long output, int input, float (&x)[8]) {
    const int chunk = input / kRowChunkInputs, step = input % kRowChunkInputs / kStepInputs;
    const int lane = input % kStepInputs / 8;
    const unsigned char* at = weights.row(output) + (long long)(chunk) * kRowChunkBytes + lane * 16 + step * WEIGHT;
    unsigned pairs[4];
#if GROUP
    const long long group = output * weights.num_groups() + input / GROUP;
#else
    const long long group = output;
#endif
    const float scale = to_float(weights.scales[group]);
#if WEIGHT == 4
    widen_word(*reinterpret_cast<const unsigned*>(at), kHasZeros ? weights.zeros[group] : 0, pairs);
#else
    const uint2 words = *reinterpret_cast<const uint2*>(at);
    widen_words(words.x, words.y, pairs);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        unpack(Act{}, pairs[i], x[2 * i], x[2 * i + 1]);
        x[2 * i] *= scale, x[2 * i + 1] *= scale;
    }
}

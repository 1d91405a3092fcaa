// Weights of 4 or 8 bits as LaneWeights; see product_tiles.cuh. Macros: ACT; WEIGHT, the bits; FLOAT, whether they are a
// float, E2M1 or E4M3; GROUP, the inputs that share a scale, and of 4-bit integers a zero point, or 0; BLOCKS, whether
// they are integers in GGML's blocks. ops/packed_weights.py packs them.
//
// A row of values has one chunk after the other, of 64 (8 bits) or 128 inputs (4 bits), 64 bytes each: 16 bytes for each
// lane of four, and in these the lane's 8 inputs of each step. The last chunk is filled up. Of 8 inputs with 4 bits,
// number i has bits 4 (i / 2) and up if i is even, and 16 + 4 (i / 2) and up if it is odd.

#pragma once

#include "products/product_tiles.cuh"

#define HAS_ZEROS (WEIGHT == 4 && !FLOAT && !BLOCKS)

#if WEIGHT == 4 && FLOAT
struct E8m0 {  // 2^(exponent - 127); exponents from 1 to 254
    unsigned char exponent;
};
__device__ __forceinline__ float to_float(E8m0 x) { return __uint_as_float(unsigned(x.exponent) << 23); }
using Scale = E8m0;
#elif WEIGHT == 4 || BLOCKS
using Scale = Fp16;
#elif WEIGHT == 8
using Scale = float;
#else
#error "WEIGHT is 4 or 8"
#endif

constexpr int kRowChunkBytes = kChunkBytes;
constexpr int kRowChunkInputs = kRowChunkBytes * 8 / WEIGHT;

// [outputs, inputs] of w = scale * (value - zero). Scales and zeros [outputs, groups], or without groups scales
// [outputs]; the last chunk has all its groups. Only integers of 4 bits have zeros; those of 8 bits are signed.
//
// In blocks, w = scale * value - minimum. scales [outputs, blocks, kinds] are the factors of scales and, if kinds is 2,
// of minima. If a block has several groups, zeros [outputs, groups, kinds] are the signed multipliers of both. `blocks`
// has the logarithm of a group's inputs in bits 0 to 7, that of a block's in bits 8 to 15, and kinds - 1 in bit 16.
struct PackedWeights {
    const unsigned char* values;
    const Scale* scales;
    const unsigned char* zeros;
    int inputs;
    int blocks;

    __device__ __forceinline__ int num_chunks() const { return (inputs + kRowChunkInputs - 1) / kRowChunkInputs; }
    __device__ __forceinline__ const unsigned char* row(long long output) const {
        return values + output * num_chunks() * kRowChunkBytes;
    }
#if BLOCKS
    __device__ __forceinline__ void read_factors(long long output, int input, float& scale, float& minimum) const {
        const int group_shift = blocks & 255, block_shift = blocks >> 8 & 255, kinds = 1 + (blocks >> 16);
        const int filled = num_chunks() * kRowChunkInputs;
        const Scale* factors = scales + (output * (filled >> block_shift) + (input >> block_shift)) * kinds;
        scale = to_float(factors[0]);
        minimum = kinds > 1 ? to_float(factors[1]) : 0.0f;
        if (block_shift == group_shift) return;
        const unsigned char* multipliers = zeros + (output * (filled >> group_shift) + (input >> group_shift)) * kinds;
        scale *= float(static_cast<signed char>(multipliers[0]));
        if (kinds > 1) minimum *= float(static_cast<signed char>(multipliers[1]));
    }
#endif
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
        pairs[i] = FLOAT ? widen_e2m1(Act{}, pair) : subtract_zero(Act{}, pair, zero);
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

// Values of a block → weights.
__device__ __forceinline__ void scale_pairs(unsigned (&pairs)[4], float scale, float minimum) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float low, high;
        unpack(Act{}, pairs[i], low, high);
        pairs[i] = pack(Act{}, low * scale - minimum, high * scale - minimum);
    }
}

struct QuantisedWeights {
    static constexpr int kStepsHeld = kRowChunkInputs / kStepInputs;
    static constexpr bool kHasGroups = GROUP != 0;

    const unsigned char* rows[kLaneOutputs];
    uint4 held[kLaneOutputs];
#if BLOCKS
    const PackedWeights& weights;
    long long outputs_before;
    TileColumns columns;
    float scales[kLaneOutputs][kStepsHeld], minima[kLaneOutputs][kStepsHeld];
#endif

    __device__ __forceinline__ static unsigned word(const uint4& x, int i) {
        return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
    }

#if GROUP
    static constexpr int kGroupsHeld = kRowChunkInputs > GROUP ? kRowChunkInputs / GROUP : 1;

    const Scale* scale_rows[kLaneOutputs];
    float scales[kLaneOutputs][kGroupsHeld];
#endif
#if HAS_ZEROS
    const unsigned char* zero_rows[kLaneOutputs];
    unsigned zeros[kLaneOutputs][kGroupsHeld];
#endif

    // Output 0 of the columns is row `before` of the weights.
    __device__ __forceinline__ QuantisedWeights(const PackedWeights& weights, const TileColumns& columns,
                                                long long before)
#if BLOCKS
        : weights(weights), outputs_before(before), columns(columns)
#endif
    {
#pragma unroll
        for (int i = 0; i < kLaneOutputs; ++i) {
            const long long output = before + columns.of_lane(i);
            rows[i] = weights.row(output) + threadIdx.x % 4 * 16;
#if GROUP
            scale_rows[i] = weights.scales + output * weights.num_groups();
#endif
#if HAS_ZEROS
            zero_rows[i] = weights.zeros + output * weights.num_groups();
#endif
        }
    }
    __device__ __forceinline__ int num_bytes(int) const { return 16; }
    __device__ __forceinline__ void fetch(int chunk) {
#pragma unroll
        for (int i = 0; i < kLaneOutputs; ++i)
            held[i] = *reinterpret_cast<const uint4*>(rows[i] + (long long)(chunk) * kRowChunkBytes);
        fetch_scales(chunk);
    }
    __device__ __forceinline__ void fetch_scales([[maybe_unused]] int chunk) {
#pragma unroll
        for (int i = 0; i < kLaneOutputs; ++i) {
#if BLOCKS
            const int lane = threadIdx.x % 32;
            const long long output = outputs_before + columns.of_lane(i);
#pragma unroll
            for (int step = 0; step < kStepsHeld; ++step) {
                const int input = chunk * kRowChunkInputs + step * kStepInputs + lane % 4 * 8;
                weights.read_factors(output, input, scales[i][step], minima[i][step]);
            }
#endif
#if GROUP
            const int first = chunk * kRowChunkInputs / GROUP;
#pragma unroll
            for (int group = 0; group < kGroupsHeld; ++group) {
                scales[i][group] = to_float(scale_rows[i][first + group]);
#if HAS_ZEROS
                zeros[i][group] = zero_rows[i][first + group];
#endif
            }
#endif
        }
    }
#if HAS_ZEROS
    __device__ __forceinline__ unsigned zero_of(int i, int step) const { return zeros[i][step * kStepInputs / GROUP]; }
#else
    __device__ __forceinline__ unsigned zero_of(int, int) const { return 0; }
#endif
    __device__ __forceinline__ void read(LaneWeights& w, int step) const {
#pragma unroll
        for (int i = 0; i < kLaneOutputs; ++i) {
#if WEIGHT == 4
            widen_word(word(held[i], step), zero_of(i, step), w.pairs[i]);
#else
            widen_words(word(held[i], 2 * step), word(held[i], 2 * step + 1), w.pairs[i]);
#endif
#if BLOCKS
            scale_pairs(w.pairs[i], scales[i][step], minima[i][step]);
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
    float scale, minimum = 0.0f;
#if BLOCKS
    const long long group = 0;
    weights.read_factors(output, input, scale, minimum);
#else
#if GROUP
    const long long group = output * weights.num_groups() + input / GROUP;
#else
    const long long group = output;
#endif
    scale = to_float(weights.scales[group]);
#endif
#if WEIGHT == 4
    widen_word(*reinterpret_cast<const unsigned*>(at), HAS_ZEROS ? weights.zeros[group] : 0, pairs);
#else
    const uint2 words = *reinterpret_cast<const uint2*>(at);
    widen_words(words.x, words.y, pairs);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        unpack(Act{}, pairs[i], x[2 * i], x[2 * i + 1]);
        x[2 * i] = x[2 * i] * scale - minimum, x[2 * i + 1] = x[2 * i + 1] * scale - minimum;
    }
}

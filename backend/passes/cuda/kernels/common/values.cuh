// Number formats in memory, and their conversion from and to float: singly, or 8 at a time with 16-byte accesses. If a
// kernel is compiled with the macros ACT and KV_DTYPE, they define the types Act and Kv.

#pragma once

#include "common/ptx.cuh"

constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

struct Bf16 {
    unsigned short bits;
};
struct Fp16 {
    unsigned short bits;
};
struct Fp8 {  // e4m3
    unsigned char bits;
};
struct Q8 {  // q8_0: 32 consecutive numbers share a scale, which is stored elsewhere
    signed char number;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ float to_float(Fp16 x) { return f16_to_float(x.bits); }
__device__ __forceinline__ float to_float(Fp8 x) { return f16_to_float((unsigned short)(e4m3x2_to_f16x2(x.bits))); }

// Round to nearest, ties to even. Fp8 saturates at ±448; only a NaN becomes NaN.
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ Bf16 from_float<Bf16>(float x) { return {float_to_bf16(x)}; }
template <> __device__ __forceinline__ Fp16 from_float<Fp16>(float x) { return {float_to_f16(x)}; }
template <> __device__ __forceinline__ Fp8 from_float<Fp8>(float x) { return {float_to_e4m3(x)}; }

// Two neighbouring numbers in one register, the first in the lower half.
__device__ __forceinline__ void unpack(Bf16, unsigned pair, float& low, float& high) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ void unpack(Fp16, unsigned pair, float& low, float& high) {
    low = f16_to_float((unsigned short)(pair));
    high = f16_to_float((unsigned short)(pair >> 16));
}
__device__ __forceinline__ unsigned pack(Bf16, float low, float high) { return pack_bf16x2(low, high); }
__device__ __forceinline__ unsigned pack(Fp16, float low, float high) { return pack_f16x2(low, high); }

// Load 8 numbers. p must be a multiple of 16 bytes (8 for Fp8 and Q8).
__device__ __forceinline__ void load8(const float* p, float (&x)[8]) {
    const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
template <class T> __device__ __forceinline__ void load8(const T* p, float (&x)[8]) {
    const uint4 a = *reinterpret_cast<const uint4*>(p);
    unpack(T{}, a.x, x[0], x[1]);
    unpack(T{}, a.y, x[2], x[3]);
    unpack(T{}, a.z, x[4], x[5]);
    unpack(T{}, a.w, x[6], x[7]);
}
__device__ __forceinline__ void load8(const Fp8* p, float (&x)[8]) {
    const uint2 a = *reinterpret_cast<const uint2*>(p);
    unpack(Fp16{}, e4m3x2_to_f16x2((unsigned short)(a.x)), x[0], x[1]);
    unpack(Fp16{}, e4m3x2_to_f16x2((unsigned short)(a.x >> 16)), x[2], x[3]);
    unpack(Fp16{}, e4m3x2_to_f16x2((unsigned short)(a.y)), x[4], x[5]);
    unpack(Fp16{}, e4m3x2_to_f16x2((unsigned short)(a.y >> 16)), x[6], x[7]);
}
// Without the scale.
__device__ __forceinline__ void load8(const Q8* p, float (&x)[8]) {
    const uint2 a = *reinterpret_cast<const uint2*>(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[i] = float((signed char)(a.x >> (8 * i)));
        x[i + 4] = float((signed char)(a.y >> (8 * i)));
    }
}

__device__ __forceinline__ void store8(float* p, const float (&x)[8]) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(p + 4) = make_float4(x[4], x[5], x[6], x[7]);
}
template <class T> __device__ __forceinline__ void store8(T* p, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(p) = make_uint4(pack(T{}, x[0], x[1]), pack(T{}, x[2], x[3]), pack(T{}, x[4], x[5]),
                                              pack(T{}, x[6], x[7]));
}
__device__ __forceinline__ void store8(Fp8* p, const float (&x)[8]) {
    *reinterpret_cast<uint2*>(p) =
        make_uint2(pack_e4m3x2(x[0], x[1]) | unsigned(pack_e4m3x2(x[2], x[3])) << 16,
                   pack_e4m3x2(x[4], x[5]) | unsigned(pack_e4m3x2(x[6], x[7])) << 16);
}
// Of whole numbers from -127 to 127.
__device__ __forceinline__ void store8(Q8* p, const float (&x)[8]) {
    unsigned low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        low |= (unsigned(int(x[i])) & 0xffu) << (8 * i);
        high |= (unsigned(int(x[i + 4])) & 0xffu) << (8 * i);
    }
    *reinterpret_cast<uint2*>(p) = make_uint2(low, high);
}

#ifdef ACT
#if ACT == 0
using Act = float;
#elif ACT == 1
using Act = Bf16;
#elif ACT == 2
using Act = Fp16;
#else
#error "ACT is 0 (fp32), 1 (bf16) or 2 (fp16)"
#endif
#endif

#ifdef KV_DTYPE
#if KV_DTYPE == 0
using Kv = float;
#elif KV_DTYPE == 1
using Kv = Bf16;
#elif KV_DTYPE == 2
using Kv = Q8;
#elif KV_DTYPE == 3
using Kv = Fp8;
#else
#error "KV_DTYPE is 0 (fp32), 1 (bf16), 2 (q8_0) or 3 (fp8)"
#endif

constexpr int kQ8Block = 32;  // numbers of a head that share a scale
constexpr bool kKvHasScales = KV_DTYPE == 2;

// One page of one head, keys or values: page_size rows of head_dim numbers, followed in q8_0 by as many rows of scales.
// See kv_cache/cache_layout.py.
struct KvBlock {
    Kv* numbers;
    Fp16* scales;  // of q8_0 only

    // layer: start of the layer's pages. which: 0 keys, 1 values.
    __device__ __forceinline__ KvBlock(unsigned char* layer, int page, int which, int kv_head, int num_kv_heads,
                                       int page_size, int head_dim) {
        const long long values = (long long)(page_size) * head_dim;
        const long long bytes = values * int(sizeof(Kv)) + (kKvHasScales ? values / kQ8Block * int(sizeof(Fp16)) : 0);
        unsigned char* start = layer + (((long long)(page) * 2 + which) * num_kv_heads + kv_head) * bytes;
        numbers = reinterpret_cast<Kv*>(start);
        scales = reinterpret_cast<Fp16*>(start + values * int(sizeof(Kv)));
    }
    __device__ __forceinline__ Kv* row(int place, int head_dim) const { return numbers + place * head_dim; }
    __device__ __forceinline__ Fp16* row_scales(int place, int head_dim) const {
        return scales + place * (head_dim / kQ8Block);
    }
};
#endif

// All inline PTX: each instruction once for the GPU and once, under CUSIM, as the CPU computes it in tests.

#pragma once

// ---------------------------------------------------------------- conversions
// Pairs have their first number in the lower half. All round to nearest, ties to even.

#ifndef CUSIM
__device__ __forceinline__ unsigned pack_bf16x2(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ unsigned pack_f16x2(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float f16_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
#else
inline unsigned pack_bf16x2(float low, float high) { return cusim_f2bf(low) | unsigned(cusim_f2bf(high)) << 16; }
inline unsigned pack_f16x2(float low, float high) { return cusim_f2h(low) | unsigned(cusim_f2h(high)) << 16; }
inline float f16_to_float(unsigned short bits) { return cusim_h2f(bits); }
#endif

#if !defined(CUSIM) && __CUDA_ARCH__ >= 890
// ±448 where it would be more; NaN stays NaN.
__device__ __forceinline__ unsigned short pack_e4m3x2(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ unsigned e4m3x2_to_f16x2(unsigned short pair) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
#else  // what sm_80 computes, and the CPU
__device__ __forceinline__ unsigned float_to_e4m3(float x) {
    const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    if (size > 0x7f800000u) return sign | 0x7fu;
    if (size >= __float_as_uint(448.0f)) return sign | 0x7eu;
    // Below 2^-6 the step is 2^-9 throughout, the last place of a float near 2^14.
    if (size < __float_as_uint(0.015625f)) return sign | (__float_as_uint(__uint_as_float(size) + 16384.0f) & 0xfu);
    return sign | ((size + 0x7ffffu + (size >> 20 & 1u) >> 20) - (120u << 3));
}
__device__ __forceinline__ unsigned short pack_e4m3x2(float low, float high) {
    return (unsigned short)(float_to_e4m3(low) | float_to_e4m3(high) << 8);
}
// An e4m3 moved into binary16's place is 2^8 too small; the product is exact.
__device__ __forceinline__ unsigned e4m3_to_f16(unsigned x) {
    const unsigned size = x & 0x7fu, sign = (x & 0x80u) << 8;
    if (size == 0x7fu) return sign | 0x7fffu;
    return sign | (pack_f16x2(f16_to_float((unsigned short)(size << 7)) * 256.0f, 0.0f) & 0xffffu);
}
__device__ __forceinline__ unsigned e4m3x2_to_f16x2(unsigned short pair) {
    return e4m3_to_f16(pair & 0xffu) | e4m3_to_f16(pair >> 8) << 16;
}
#endif

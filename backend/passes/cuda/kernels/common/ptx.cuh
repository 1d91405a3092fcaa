// Every inline PTX instruction of the kernels, with an emulation of each for the CPU (CUSIM; tests/cuda_emulator).
//
// 16-bit floats are passed as unsigned short, pairs of them as unsigned with the first in the low half; e4m3 bytes as
// unsigned char, pairs as unsigned short. A NaN becomes the instruction's own NaN: 0x7fff, or 0x7f in e4m3. Functions
// of a warp must be called by all 32 lanes, at the same call.

#pragma once

#ifndef CUSIM

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ---- Conversions: round to nearest, ties to even ----

__device__ __forceinline__ unsigned short float_to_bf16(float x) {
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ unsigned pack_bf16x2(float low, float high) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ unsigned short float_to_f16(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ unsigned pack_f16x2(float low, float high) {
    unsigned y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ float f16_to_float(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

// ---- Matrix products of a warp: acc [16, 8] += a [16, 16] · b [16, 8], in the fragments of mma.m16n8k16 ----

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Load 8 × 8 matrices of 16-bit values from shared memory, one per register ----
// Lane 8 i + j passes the address of row j of matrix i, a multiple of 16.

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// ---- Asynchronous copies from global to shared memory ----
// Both addresses are multiples of 16. Only source_bytes (0 to 16) are read from source; zeros fill the rest. A thread
// sees its copies after its own wait; other threads see them after a barrier that follows that wait.

__device__ __forceinline__ void cp_async_16(void* shared, const void* source, int source_bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}

// Like cp_async_16, with 4 bytes at multiples of 4.
__device__ __forceinline__ void cp_async_4(void* shared, const void* source, int source_bytes = 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most N of the groups that this thread committed are still in flight.
template <int N> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- Launches that begin before the kernels before them have ended (programmatic dependent launch, from sm_90) ----
// Every thread of such a kernel must call wait_for_earlier_kernels. Before that it may read only what no kernel of the
// pass writes, and must not write to global memory. Such reads may go through the read-only cache; others must not be
// marked __restrict__, or the compiler may move them before the wait.

__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel begin, if it is such a launch, once all blocks have called this.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Approximations by the special function unit: within about 2 ulp; subnormals count as 0 ----

__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float lg2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger of two numbers; NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// ---- Bits ----

// Byte i of the result is the byte (0 to 7) of {a, b} that nibble i of selector names; a nibble of 8 or more repeats
// the sign bit of byte nibble - 8.
__device__ __forceinline__ unsigned prmt(unsigned a, unsigned b, unsigned selector) {
    unsigned y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
    return y;
}

__device__ __forceinline__ unsigned add_f16x2(unsigned a, unsigned b) {
    unsigned y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

__device__ __forceinline__ unsigned mul_f16x2(unsigned a, unsigned b) {
    unsigned y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// A GPU of sm_80 has no other sum of bf16 pairs.
__device__ __forceinline__ unsigned add_bf16x2(unsigned a, unsigned b) {
    unsigned y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return y;
}

// Also for subnormal numbers. The addend is -0, which keeps the sign of a zero.
__device__ __forceinline__ unsigned mul_bf16x2(unsigned a, unsigned b) {
    unsigned y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));
    return y;
}

#else  // CUSIM

__device__ __forceinline__ unsigned short float_to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ unsigned pack_bf16x2(float low, float high) {
    return float_to_bf16(low) | static_cast<unsigned>(float_to_bf16(high)) << 16;
}

__device__ __forceinline__ unsigned short float_to_f16(float x) { return x != x ? 0x7fff : cusim::float_to_half(x); }

__device__ __forceinline__ unsigned pack_f16x2(float low, float high) {
    return float_to_f16(low) | static_cast<unsigned>(float_to_f16(high)) << 16;
}

__device__ __forceinline__ float f16_to_float(unsigned short x) { return cusim::half_to_float(x); }

inline void mma_m16n8k16_bf16(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, CUSIM_HERE) {
    cusim::mma(cusim::Number::kBf16, acc, a, b0, b1, here);
}

inline void mma_m16n8k16_f16(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, CUSIM_HERE) {
    cusim::mma(cusim::Number::kFp16, acc, a, b0, b1, here);
}

inline void ldmatrix_x4(unsigned (&r)[4], const void* row, CUSIM_HERE) { cusim::ldmatrix(r, false, row, here); }

inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, CUSIM_HERE) { cusim::ldmatrix(r, true, row, here); }

inline void cp_async_16(void* shared, const void* source, int source_bytes = 16, CUSIM_HERE) {
    cusim::async_copy(shared, source, 16, source_bytes, here);
}

inline void cp_async_4(void* shared, const void* source, int source_bytes = 4, CUSIM_HERE) {
    cusim::async_copy(shared, source, 4, source_bytes, here);
}

inline void cp_async_commit() { cusim::async_commit(); }

template <int N> inline void cp_async_wait() { cusim::async_wait(N); }

inline void wait_for_earlier_kernels() { cusim::wait_for_earlier_kernels(); }

inline void let_next_kernel_begin() {}

__device__ __forceinline__ float ex2_approx(float x) { return cusim::ex2_approx(x); }

__device__ __forceinline__ float lg2_approx(float x) { return cusim::lg2_approx(x); }

__device__ __forceinline__ float rcp_approx(float x) { return cusim::rcp_approx(x); }

__device__ __forceinline__ float max_or_nan(float a, float b) {
    return a != a || b != b ? __uint_as_float(0x7fffffffu) : fmaxf(a, b);
}

__device__ __forceinline__ unsigned prmt(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = a | static_cast<unsigned long long>(b) << 32;
    unsigned y = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned nibble = selector >> (4 * i) & 15;
        const unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7))) & 255;
        y |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return y;
}

__device__ __forceinline__ unsigned add_f16x2(unsigned a, unsigned b) {
    const auto half = [](unsigned x) { return f16_to_float(static_cast<unsigned short>(x)); };
    return pack_f16x2(half(a) + half(b), half(a >> 16) + half(b >> 16));
}

__device__ __forceinline__ unsigned add_bf16x2(unsigned a, unsigned b) {
    return pack_bf16x2(__uint_as_float(a << 16) + __uint_as_float(b << 16),
                       __uint_as_float(a & 0xffff0000u) + __uint_as_float(b & 0xffff0000u));
}

__device__ __forceinline__ unsigned mul_bf16x2(unsigned a, unsigned b) {
    // In double, because the emulation's floats, like the kernels', have no subnormal numbers.
    const auto exact = [](unsigned x) {
        const double subnormal = (x & 0x80000000u ? -0x1p-133 : 0x1p-133) * double(x >> 16 & 0x7f);
        return x & 0x7f800000u ? double(__uint_as_float(x)) : subnormal;
    };
    return pack_bf16x2(float(exact(a << 16) * exact(b << 16)),
                       float(exact(a & 0xffff0000u) * exact(b & 0xffff0000u)));
}

__device__ __forceinline__ unsigned mul_f16x2(unsigned a, unsigned b) {
    const auto half = [](unsigned x) { return f16_to_float(static_cast<unsigned short>(x)); };
    return pack_f16x2(half(a) * half(b), half(a >> 16) * half(b >> 16));
}

#endif  // CUSIM

// ---- Functions that are one instruction on some GPUs only ----

#if !defined(CUSIM) && __CUDA_ARCH__ >= 890

// Round to the nearest e4m3. Values beyond ±448, including infinities, become ±448.
__device__ __forceinline__ unsigned short pack_e4m3x2(float low, float high) {
    unsigned short y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ unsigned char float_to_e4m3(float x) {
    return static_cast<unsigned char>(pack_e4m3x2(x, 0.0f));
}

__device__ __forceinline__ unsigned e4m3x2_to_f16x2(unsigned short x) {
    unsigned y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(x));
    return y;
}

#else

__device__ __forceinline__ unsigned char float_to_e4m3(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    unsigned y;
    if (magnitude > 0x7f800000) return 0x7f;
    if (magnitude >= 0x43e00000) {  // 448
        y = 0x7e;
    } else if (magnitude < 0x3c800000) {  // 2^-6, the smallest normal number; smaller ones are multiples of 2^-9
        y = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) - 0x46800000;
    } else {
        y = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
        y -= (127 - 7) << 3;
    }
    return static_cast<unsigned char>(sign | y);
}

__device__ __forceinline__ unsigned short pack_e4m3x2(float low, float high) {
    return static_cast<unsigned short>(float_to_e4m3(low) | float_to_e4m3(high) << 8);
}

__device__ __forceinline__ unsigned e4m3x2_to_f16x2(unsigned short x) {
    // Shifted into place, the bits are an fp16 number that is 2^8 too small: the exponent biases are 7 and 15.
    const unsigned spread = prmt(x, 0, 0x1404);  // bytes 0 and 1 in the upper byte of each half
    const unsigned y = mul_f16x2((spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u), 0x5c005c00u);
    const unsigned nan = ((spread & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
    return (y | (nan - (nan >> 15))) & ~nan;  // a NaN has all bits set except the sign
}

#endif

// Take the next number of a counter in global memory. Global writes of this thread, and of threads that it met at a
// barrier before, are visible to the thread that takes a later number, and to threads that it meets at a barrier after.
__device__ __forceinline__ unsigned take_ticket(unsigned* counter) {
    __threadfence();
    const unsigned ticket = atomicAdd(counter, 1u);
    __threadfence();
    return ticket;
}

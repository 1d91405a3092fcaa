// CUDA's keywords, vector types and index variables.

#pragma once

#include <string.h>

#include <type_traits>

#include "runtime.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __shared__ static  // build.py moves these variables to their own section, which is reset for each block

#define CUSIM_VECTOR_2(T, NAME, ALIGNMENT)                        \
    struct alignas(ALIGNMENT) NAME##2 {                           \
        T x, y;                                                   \
    };                                                            \
    static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }
#define CUSIM_VECTOR_4(T, NAME, ALIGNMENT)                        \
    struct alignas(ALIGNMENT) NAME##4 {                           \
        T x, y, z, w;                                             \
    };                                                            \
    static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

CUSIM_VECTOR_2(float, float, 8)
CUSIM_VECTOR_4(float, float, 16)
CUSIM_VECTOR_2(int, int, 8)
CUSIM_VECTOR_4(int, int, 16)
CUSIM_VECTOR_2(unsigned, uint, 8)
CUSIM_VECTOR_4(unsigned, uint, 16)
CUSIM_VECTOR_2(short, short, 4)
CUSIM_VECTOR_4(short, short, 8)
CUSIM_VECTOR_2(unsigned short, ushort, 4)
CUSIM_VECTOR_4(unsigned short, ushort, 8)
CUSIM_VECTOR_2(signed char, char, 2)
CUSIM_VECTOR_4(signed char, char, 4)
CUSIM_VECTOR_2(unsigned char, uchar, 2)
CUSIM_VECTOR_4(unsigned char, uchar, 4)
CUSIM_VECTOR_2(double, double, 16)
CUSIM_VECTOR_2(long long, longlong, 16)
CUSIM_VECTOR_2(unsigned long long, ulonglong, 16)

#define threadIdx (cusim::machine.thread_index)
#define blockIdx (cusim::machine.block_index)
#define blockDim (cusim::machine.block_dim)
#define gridDim (cusim::machine.grid_dim)
static constexpr int warpSize = 32;

namespace cusim {

template <class To, class From> inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// `extern __shared__ T name[]` becomes `T* name = dynamic_shared<T>()`.
template <class T> inline T* dynamic_shared() { return reinterpret_cast<T*>(machine.dynamic_shared); }

}  // namespace cusim

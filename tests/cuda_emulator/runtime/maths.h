// CUDA's arithmetic. Approximate functions are as exact as the C library, unless CUSIM_AS_DEVICE is defined. Then each
// has an error of either sign, up to the limit in the PTX manual and the CUDA C++ Programming Guide, and operations
// that round on their own (__fmul_rn and the like) are not fused.

#pragma once

#include "language.h"

extern "C" {
float expf(float), exp2f(float), exp10f(float), expm1f(float), logf(float), log2f(float), log10f(float), log1pf(float);
float sqrtf(float), cbrtf(float), sinf(float), cosf(float), tanf(float), tanhf(float), erff(float), powf(float, float);
float fabsf(float), floorf(float), ceilf(float), truncf(float), roundf(float), rintf(float), nearbyintf(float);
float fmaf(float, float, float), fmaxf(float, float), fminf(float, float), fmodf(float, float), ldexpf(float, int);
float copysignf(float, float);
double exp(double), log(double), sqrt(double), fabs(double), floor(double), fma(double, double, double);
long lrintf(float), lroundf(float);
int abs(int) noexcept;
}

namespace cusim {
// x, opaque to the compiler, so that it is not fused.
static inline float rounded(float x) {
#ifdef CUSIM_AS_DEVICE
    asm("" : "+x"(x));
#endif
    return x;
}
// A pseudo-random error from -limit to limit, derived from the bits of x.
static inline float error_of([[maybe_unused]] float x, [[maybe_unused]] float limit) {
#ifdef CUSIM_AS_DEVICE
    return float(int(bit_cast<unsigned>(x) * 0x9e3779b9u) >> 8) * 0x1p-23f * limit;
#else
    return 0.0f;
#endif
}
// y with a relative error of at most `error`, derived from x.
static inline float inexact(float y, float x, float error) {
    return __builtin_isfinite(y) ? rounded(y + y * error_of(x, error)) : y;
}
static inline float ex2_approx(float x) { return inexact(exp2f(x), x, 0x1p-22f); }
static inline float rcp_approx(float x) { return inexact(1.0f / x, x, 0x1p-23f); }
static inline float lg2_approx(float x) {
    const float y = log2f(x);
    return x > 0.5f && x < 2.0f ? rounded(y + error_of(x, 0x1p-22f)) : inexact(y, x, 0x1p-22f);
}
static inline float expf(float x) { return inexact(::expf(x), x, 0x1p-22f); }
static inline float logf(float x) { return inexact(::logf(x), x, 0x1p-23f); }
static inline float tanhf(float x) { return inexact(::tanhf(x), x, 0x1p-22f); }
}  // namespace cusim
#define expf cusim::expf
#define logf cusim::logf
#define tanhf cusim::tanhf

// Macros, because glibc defines some of these names.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __powf powf

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return cusim::rounded(cusim::rounded(a) + cusim::rounded(b)); }
static inline float __fsub_rn(float a, float b) { return cusim::rounded(cusim::rounded(a) - cusim::rounded(b)); }
static inline float __fmul_rn(float a, float b) { return cusim::rounded(a * b); }
static inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
static inline void sincosf(float x, float* sine, float* cosine) {
    *sine = sinf(x);
    *cosine = cosf(x);
}
static inline void __sincosf(float x, float* sine, float* cosine) { sincosf(x, sine, cosine); }

static inline bool isnan(float x) { return __builtin_isnan(x); }
static inline bool isinf(float x) { return __builtin_isinf(x); }
static inline bool isfinite(float x) { return __builtin_isfinite(x); }
static inline bool signbit(float x) { return __builtin_signbit(x); }

// CUDA's conversions to integers saturate, and a NaN becomes 0.
namespace cusim {
template <class T> inline T saturating(float x, double low, double high) {
    if (x != x) return 0;
    return double(x) <= low ? T(low) : double(x) >= high ? T(high) : T(x);
}
}  // namespace cusim
static inline int __float2int_rn(float x) { return cusim::saturating<int>(rintf(x), -2147483648.0, 2147483647.0); }
static inline int __float2int_rz(float x) { return cusim::saturating<int>(truncf(x), -2147483648.0, 2147483647.0); }
static inline int __float2int_rd(float x) { return cusim::saturating<int>(floorf(x), -2147483648.0, 2147483647.0); }
static inline int __float2int_ru(float x) { return cusim::saturating<int>(ceilf(x), -2147483648.0, 2147483647.0); }
static inline unsigned __float2uint_rn(float x) { return cusim::saturating<unsigned>(rintf(x), 0.0, 4294967295.0); }
static inline unsigned __float2uint_rz(float x) { return cusim::saturating<unsigned>(truncf(x), 0.0, 4294967295.0); }
static inline float __int2float_rn(int x) { return float(x); }
static inline float __uint2float_rn(unsigned x) { return float(x); }
static inline float __uint2float_rz(unsigned x) {
    const float y = float(x);
    return double(y) > double(x) ? __builtin_nextafterf(y, 0.0f) : y;
}

static inline float __int_as_float(int x) { return cusim::bit_cast<float>(x); }
static inline float __uint_as_float(unsigned x) { return cusim::bit_cast<float>(x); }
static inline int __float_as_int(float x) { return cusim::bit_cast<int>(x); }
static inline unsigned __float_as_uint(float x) { return cusim::bit_cast<unsigned>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
    return y;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
static inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned y = 0;
    for (int i = 0; i < 4; ++i) y |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return y;
}
static inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i) sum += int((signed char)(a >> 8 * i)) * int((signed char)(b >> 8 * i));
    return sum;
}

template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) {
    const std::common_type_t<A, B> x = a, y = b;
    return y < x ? y : x;
}
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) {
    const std::common_type_t<A, B> x = a, y = b;
    return x < y ? y : x;
}
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

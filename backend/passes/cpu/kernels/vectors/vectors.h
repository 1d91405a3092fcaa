// SIMD, sixteen numbers at a time: chooses the vector layer for the machine, and builds functions from it.
//
// A vector layer defines Floats (16 fp32), Ints (16 int32, or 32 int16 in pairs), Mask (16 lanes), functions on them,
// and how many rows and vectors fit a micro-kernel's registers (kMaxRows, max_vectors, kWideRows). All layers compute the same
// formulas; results may differ in bits from machine to machine, but not on one.

#pragma once

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

using i64 = std::int64_t;
using bf16 = std::uint16_t;
using Half = std::uint16_t;  // IEEE binary16

// How many numbers one 32-bit lane of a product holds: a pair of bf16, or one fp32.
template <class T> constexpr int kLane = std::is_same_v<T, float> ? 1 : 2;

// How bytes of weights are multiplied: numbers so small that the sums of 32 inputs may have 16 bits, from 0 to 127, or
// int8 + kWeightOffset.
enum class Dot { kSmall, kUnsigned, kSigned };

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const std::uint32_t bits = std::uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

}  // namespace

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "vectors/vectors_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vectors/vectors_avx2.h"
#elif defined(__aarch64__)
#include "vectors/vectors_neon.h"
#else
#error "these kernels need AVX-512 (F, BW, VL), AVX2 with FMA and F16C, or NEON of ARMv8"
#endif

namespace {

// Loads or stores only the first count numbers; the rest of a loaded vector is 0. Whole accesses avoid masks, which are
// far slower on some CPUs.
template <class T> inline Floats load(const T* p, i64 count) { return count >= 16 ? load(p) : load_part(p, count); }
template <class T> inline void store(T* p, Floats x, i64 count) {
    if (count >= 16) store(p, x);
    else store_part(p, x, count);
}

constexpr float kLog2E = 1.44269504088896340736f;

// 2^x for x <= 0; 0 below the smallest normal number, NaN for NaN. Relative error below 2e-7.
inline Floats exp2_negative(Floats x) {
    const Floats whole = round_to_even(x);
    const Floats part = sub(x, whole);
    Floats y = broadcast(1.535336188319500e-4f);
    y = fmadd(y, part, broadcast(1.339887440266574e-3f));
    y = fmadd(y, part, broadcast(9.618437357674640e-3f));
    y = fmadd(y, part, broadcast(5.550332471162809e-2f));
    y = fmadd(y, part, broadcast(2.402264791363012e-1f));
    y = fmadd(y, part, broadcast(6.931472028550421e-1f));
    y = fmadd(y, part, broadcast(1.0f));
    return select(less_than(x, broadcast(-126.0f)), broadcast(0.0f), times_power_of_two(y, whole));
}

inline Floats sigmoid(Floats x) {
    const Floats one = broadcast(1.0f);
    const Floats e = exp2_negative(mul(abs(x), broadcast(-kLog2E)));
    // sigmoid(|x|) = 1 / (1 + e), sigmoid(-|x|) = e / (1 + e): no overflow either way.
    return div(select(less_than(x, broadcast(0.0f)), e, one), add(one, e));
}

// gate × sigmoid(gate) × up.
inline Floats silu_mul(Floats gate, Floats up) { return mul(mul(gate, sigmoid(gate)), up); }

// GELU in its tanh form, times up: gate × sigmoid(2 √(2/π) (gate + 0.044715 gate³)) × up.
inline Floats gelu_mul(Floats gate, Floats up) {
    const Floats factor = fmadd(mul(gate, gate), broadcast(0.0713548162726f), broadcast(1.5957691216057f));
    return mul(mul(gate, sigmoid(mul(gate, factor))), up);
}

// gate × sigmoid(alpha × gate) × (up + 1), with gate at most limit and up from -limit to limit. NaN stays NaN.
inline Floats clamped_mul(Floats gate, Floats up, Floats alpha, Floats limit) {
    const Floats least = sub(broadcast(0.0f), limit);
    gate = select(less_than(limit, gate), limit, gate);
    up = select(less_than(limit, up), limit, select(less_than(up, least), least, up));
    return mul(mul(gate, sigmoid(mul(gate, alpha))), add(up, broadcast(1.0f)));
}

// The exact GELU, times up: gate × (1 + erf(gate / √2)) / 2 × up. The error function is a polynomial of its square up to
// 3.5, where it is 1 but for 7e-7; the absolute error of the GELU is below 2e-6.
inline Floats gelu_erf_mul(Floats gate, Floats up) {
    const Floats z = mul(gate, broadcast(0.70710678118654752f));
    const Floats u = fmsub(mul(z, z), broadcast(2.0f / 12.25f), broadcast(1.0f));
    Floats y = broadcast(8.573591588e-04f);
    y = fmadd(y, u, broadcast(-2.066396221e-03f));
    y = fmadd(y, u, broadcast(1.924124814e-03f));
    y = fmadd(y, u, broadcast(-3.432933486e-03f));
    y = fmadd(y, u, broadcast(8.834656715e-03f));
    y = fmadd(y, u, broadcast(-1.517796998e-02f));
    y = fmadd(y, u, broadcast(2.236894599e-02f));
    y = fmadd(y, u, broadcast(-3.232268984e-02f));
    y = fmadd(y, u, broadcast(4.422849917e-02f));
    y = fmadd(y, u, broadcast(-5.731608215e-02f));
    y = fmadd(y, u, broadcast(7.337317705e-02f));
    y = fmadd(y, u, broadcast(-1.003501074e-01f));
    y = fmadd(y, u, broadcast(2.019365126e-01f));
    const Floats share = fmadd(y, z, broadcast(0.5f));
    // The order of the maximum's arguments keeps a NaN.
    const Floats far = max(broadcast(0.0f), gate);
    return mul(select(less_than(abs(z), broadcast(3.5f)), mul(gate, share), far), up);
}

// tanh(x) = ± (1 - e) / (1 + e), where e = exp(-2 |x|).
inline Floats tanh(Floats x) {
    const Floats one = broadcast(1.0f);
    const Floats e = exp2_negative(mul(abs(x), broadcast(-2.0f * kLog2E)));
    const Floats size = div(sub(one, e), add(one, e));
    return select(less_than(x, broadcast(0.0f)), sub(broadcast(0.0f), size), size);
}

// Prefetches the cache line that a stream through memory reads 2 KB after p. The address need not be valid.
inline void prefetch_ahead(const void* p) { __builtin_prefetch(static_cast<const char*>(p) + 2048); }

// The largest absolute value from the result of max_bits; NaN if a number is not finite.
inline float largest_magnitude(Ints top) {
    const std::int32_t bits = largest(top);
    float size;
    std::memcpy(&size, &bits, 4);
    return size < std::numeric_limits<float>::infinity() ? size : std::numeric_limits<float>::quiet_NaN();
}

// The same of x[0 … n); n is a multiple of 16.
template <class T> float largest_magnitude(const T* x, i64 n) {
    Ints top = zero_ints();
    for (i64 k = 0; k < n; k += 16) top = max_bits(top, load(x + k));
    return largest_magnitude(top);
}

}  // namespace

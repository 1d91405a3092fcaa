// Sixteen numbers at a time, whatever the machine calls them, and the functions that are made of nothing else.
//
// A vector layer defines Floats (16 fp32), Ints (16 int32, or 32 int16 in pairs) and Mask (of 16), how many rows and
// vectors a micro-kernel may hold in registers (kMaxRows, max_vectors), and functions on them. Every layer computes the
// same formulas; their bits may differ between machines, never on one.

#pragma once

#include <immintrin.h>

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

// The numbers that one 32-bit lane of a product takes: a pair of bf16, or one fp32.
template <class T> constexpr int kLane = std::is_same_v<T, float> ? 1 : 2;

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const std::uint32_t bits = std::uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline Half to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

}  // namespace

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "vectors_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vectors_avx2.h"
#else
#error "these kernels need AVX-512 (F, BW, VL), or AVX2 with FMA and F16C"
#endif

namespace {

// The first count numbers only; the rest of a vector that was loaded is 0. Partial accesses cost some CPUs far more than
// whole ones.
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
    Floats y = all(1.535336188319500e-4f);
    y = fmadd(y, part, all(1.339887440266574e-3f));
    y = fmadd(y, part, all(9.618437357674640e-3f));
    y = fmadd(y, part, all(5.550332471162809e-2f));
    y = fmadd(y, part, all(2.402264791363012e-1f));
    y = fmadd(y, part, all(6.931472028550421e-1f));
    y = fmadd(y, part, all(1.0f));
    return select(is_below(x, all(-126.0f)), all(0.0f), times_power_of_two(y, whole));
}

// gate × sigmoid(gate) × up; the exponent's argument is kept in range, where the quotient is already 0 or gate.
inline Floats silu_mul(Floats gate, Floats up) {
    const Floats one = all(1.0f);
    const Floats e = exp2_negative(mul(abs(gate), all(-kLog2E)));
    // sigmoid(|g|) = 1 / (1 + e), sigmoid(-|g|) = e / (1 + e): no overflow either way.
    const Floats sigmoid = div(select(is_below(gate, all(0.0f)), e, one), add(one, e));
    return mul(mul(gate, sigmoid), up);
}

// The largest absolute value, by what max_bits found; NaN where a number is not finite.
inline float magnitude(Ints top) {
    const std::int32_t bits = largest(top);
    float size;
    std::memcpy(&size, &bits, 4);
    return size < std::numeric_limits<float>::infinity() ? size : std::numeric_limits<float>::quiet_NaN();
}

// Of x[0 … n), n a multiple of 16.
template <class T> float magnitude(const T* x, i64 n) {
    Ints top = zero_ints();
    for (i64 k = 0; k < n; k += 16) top = max_bits(top, load(x + k));
    return magnitude(top);
}

}  // namespace

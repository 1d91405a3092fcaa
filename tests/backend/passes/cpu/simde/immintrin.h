// Runs AVX-512 code through SIMDe on CPUs with AVX2. Found in place of the compiler's header of this name.
#pragma once
#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// What SIMDe 0.7.4 lacks, lane by lane. Its vectors are not the compiler's, so the names are macros and not overloads.
namespace missing {

template <class T, class V> struct Lanes {
    T lane[sizeof(V) / sizeof(T)];
    explicit Lanes(const V& x) { std::memcpy(lane, &x, sizeof x); }
};

// The vector of f(lane) for each lane of x, from lanes of type From to lanes of type To.
template <class V, class To, class From, class W, class F> V each_lane(const W& x, const F& f) {
    const Lanes<From, W> from(x);
    To to[sizeof(W) / sizeof(From)];
    static_assert(sizeof to == sizeof(V));
    std::transform(std::begin(from.lane), std::end(from.lane), to, f);
    V result;
    std::memcpy(&result, to, sizeof to);
    return result;
}

// In the order of the compiler's function: halves are combined until one lane is left.
template <class T, class W, class F> T reduce(const W& x, const F& f) {
    Lanes<T, W> all(x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) all.lane[i] = f(all.lane[i], all.lane[i + half]);
    return all.lane[0];
}

template <class T, class W, class M> void store(void* p, M mask, const W& x) {
    const Lanes<T, W> from(x);
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) std::memcpy(static_cast<T*>(p) + i, from.lane + i, sizeof(T));
}
template <class V, class T, class M> V load(M mask, const void* p) {
    T to[16] = {};
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) std::memcpy(to + i, static_cast<const T*>(p) + i, sizeof(T));
    V result;
    std::memcpy(&result, to, sizeof to);
    return result;
}

inline std::int32_t round_to_int(float x) {
    const float whole = std::nearbyint(x);
    return whole >= -0x1p31f && whole < 0x1p31f ? std::int32_t(whole) : std::numeric_limits<std::int32_t>::min();
}

// To the nearest bf16, ties to even. The instruction takes numbers below the smallest normal one for 0.
inline std::uint16_t round_to_bf16(std::uint32_t bits) {
    if ((bits & 0x7fffffff) > 0x7f800000) return std::uint16_t(bits >> 16 | 0x40);
    if ((bits & 0x7f800000) == 0) return std::uint16_t(bits >> 16 & 0x8000);
    return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Functions of their own, or the compiler takes a minute for the copies of SIMDe's loops.
[[gnu::noinline]] inline __m512i sum_quads(const __m512i& sums, const __m512i& a, const __m512i& b) {
    const Lanes<std::uint8_t, __m512i> from_a(a);
    const Lanes<std::int8_t, __m512i> from_b(b);
    Lanes<std::int32_t, __m512i> to(sums);
    for (int i = 0; i < 64; ++i) to.lane[i / 4] += from_a.lane[i] * from_b.lane[i];
    __m512i result;
    std::memcpy(&result, to.lane, sizeof result);
    return result;
}
[[gnu::noinline]] inline __m512i sum_byte_pairs(const __m512i& a, const __m512i& b) {
    return simde_mm512_maddubs_epi16(a, b);
}
[[gnu::noinline]] inline __m512i sum_pairs(const __m512i& a, const __m512i& b) { return simde_mm512_madd_epi16(a, b); }
[[gnu::noinline]] inline __m512i multiply_shorts(const __m512i& a, const __m512i& b) {
    return simde_mm512_mullo_epi16(a, b);
}


template <int Mode> __m512 round_halves(const __m512& x) {
    __m256 halves[2];
    std::memcpy(halves, &x, sizeof x);
    for (__m256& half : halves) half = _mm256_round_ps(half, Mode);
    __m512 result;
    std::memcpy(&result, halves, sizeof result);
    return result;
}

}  // namespace missing

#undef _mm512_roundscale_ps  // SIMDe's does not truncate
#define _mm512_roundscale_ps(x, mode) missing::round_halves<mode>(x)
#undef _mm512_madd_epi16  // SIMDe means the masked function by it
#undef _mm512_maddubs_epi16
#undef _mm512_mullo_epi16
#undef _mm512_dpbusd_epi32
#define _mm512_madd_epi16(a, b) missing::sum_pairs(a, b)
#define _mm512_maddubs_epi16(a, b) missing::sum_byte_pairs(a, b)
#define _mm512_mullo_epi16(a, b) missing::multiply_shorts(a, b)
#define _mm512_dpbusd_epi32(sums, a, b) missing::sum_quads(sums, a, b)
#define _mm512_cvtepi16_epi32(x) \
    missing::each_lane<__m512i, std::int32_t, std::int16_t>(x, [](std::int16_t n) { return n; })
#define _mm512_cvtepu16_epi32(x) \
    missing::each_lane<__m512i, std::uint32_t, std::uint16_t>(x, [](std::uint16_t n) { return n; })
#define _mm512_cvtepi32_epi16(x) \
    missing::each_lane<__m256i, std::uint16_t, std::uint32_t>(x, [](std::uint32_t n) { return std::uint16_t(n); })
#define _mm512_cvtepi32_ps(x) \
    missing::each_lane<__m512, float, std::int32_t>(x, [](std::int32_t n) { return float(n); })
#define _mm512_cvtps_epi32(x) missing::each_lane<__m512i, std::int32_t, float>(x, missing::round_to_int)
#define _mm512_cvtph_ps(x) \
    missing::each_lane<__m512, float, std::uint16_t>(x, [](std::uint16_t half) { return _cvtsh_ss(half); })
#define _mm512_cvtneps_pbh(x) missing::each_lane<__m256i, std::uint16_t, std::uint32_t>(x, missing::round_to_bf16)
#define _mm512_reduce_add_ps(x) missing::reduce<float>(x, [](float a, float b) { return a + b; })
#define _mm512_reduce_max_ps(x) missing::reduce<float>(x, [](float a, float b) { return a > b ? a : b; })
#define _mm512_reduce_max_epi32(x) \
    missing::reduce<std::int32_t>(x, [](std::int32_t a, std::int32_t b) { return std::max(a, b); })
#define _mm512_maskz_loadu_ps(mask, p) missing::load<__m512, float>(mask, p)
#define _mm512_mask_storeu_ps(p, mask, x) missing::store<float>(p, mask, x)
#define _mm256_maskz_loadu_epi16(mask, p) missing::load<__m256i, std::uint16_t>(mask, p)
#define _mm256_mask_storeu_epi16(p, mask, x) missing::store<std::uint16_t>(p, mask, x)

// After the includes: those take the macros for what the compiler can do.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#ifdef PENSTOCK_SIMDE_BF16
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
#endif

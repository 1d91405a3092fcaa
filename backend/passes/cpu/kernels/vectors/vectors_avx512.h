// The vector layer for AVX-512 (F, BW, VL); uses BF16 and VNNI if the machine has them. Included by vectors.h.

#pragma once

namespace {

using Floats = __m512;
using Ints = __m512i;
// Sums of products of int16. With the element type of its instruction, GCC does not copy a sum before each addition.
using IntSums = std::int32_t __attribute__((vector_size(64)));
using Mask = __mmask16;

// 6 rows × 4 vectors of accumulators, 4 of weights and a broadcast fill the 32 registers.
constexpr int kMaxRows = 6;
constexpr int max_vectors(int /*rows*/) { return 4; }
constexpr int kWideRows = 0;  // no widened_product

inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fmsub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats abs(Floats x) { return _mm512_abs_ps(x); }
inline Floats round_to_even(Floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Floats truncate(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_two(Floats x, Floats whole) { return _mm512_scalef_ps(x, whole); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }

inline Mask less_than(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask first_lanes(i64 count) { return count >= 16 ? 0xffff : Mask((1u << count) - 1); }
inline Mask lanes_between(i64 from, i64 to) {
    return Mask(first_lanes(std::clamp<i64>(to, 0, 16)) & ~first_lanes(std::clamp<i64>(from, 0, 16)));
}
inline std::uint32_t bits_of(Mask m) { return m; }
inline Floats select(Mask m, Floats if_set, Floats if_clear) { return _mm512_mask_mov_ps(if_clear, m, if_set); }

inline __m256i round_to_bf16(Floats x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const Ints bits = _mm512_castps_si512(x);
    const Ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const Ints rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const Mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)), 16));
#endif
}
inline Floats widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Floats load_halves(const Half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats load_part(const float* p, i64 count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
inline Floats load_part(const bf16* p, i64 count) { return widen(_mm256_maskz_loadu_epi16(first_lanes(count), p)); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline void store(bf16* p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_to_bf16(x)); }
inline void store_part(float* p, Floats x, i64 count) { _mm512_mask_storeu_ps(p, first_lanes(count), x); }
inline void store_part(bf16* p, Floats x, i64 count) {
    _mm256_mask_storeu_epi16(p, first_lanes(count), round_to_bf16(x));
}

inline Half to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// Rounds to the nearest integers, ties to even; saturates.
inline void store_shorts(std::int16_t* p, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
inline void store_bytes(std::int8_t* p, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

// acc + a × b, where a is one 32-bit lane, broadcast, and b a vector of lanes.
inline Floats multiply_add(Floats acc, const float* a, Floats b) { return fmadd(broadcast(*a), b, acc); }
inline Floats multiply_add(Floats acc, const bf16* a, Floats b) {
    std::int32_t pair;
    std::memcpy(&pair, a, 4);
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_castps_si512(b));
#else
    const Ints bits = _mm512_castps_si512(b);
    acc = fmadd(broadcast(to_float(bf16(pair))), _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), acc);
    return fmadd(broadcast(to_float(bf16(std::uint32_t(pair) >> 16))),
                 _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(std::int32_t(0xffff0000)))), acc);
#endif
}

// The maximum of the absolute values' bits: as integers they order finite numbers, infinity and NaN.
inline Ints max_bits(Ints top, Floats x) { return _mm512_max_epi32(top, _mm512_castps_si512(abs(x))); }
inline std::int32_t largest(Ints x) { return _mm512_reduce_max_epi32(x); }

inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
// Loads 16 pairs of int8 as int16.
inline Ints load_pairs(const std::int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats to_floats(IntSums x) { return to_floats((Ints)x); }
inline IntSums multiply_add(IntSums acc, const std::int16_t* a, Ints b) {
    std::int32_t pair;
    std::memcpy(&pair, a, 4);
#ifdef __AVX512VNNI__
    return (IntSums)_mm512_dpwssd_epi32((Ints)acc, _mm512_set1_epi32(pair), b);
#else
    return (IntSums)_mm512_add_epi32((Ints)acc, _mm512_madd_epi16(_mm512_set1_epi32(pair), b));
#endif
}

inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
// 16 int8 as floats.
inline Floats load_bytes(const std::int8_t* p) {
    const __m256i shorts = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return to_floats(_mm512_cvtepi16_epi32(shorts));
}
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints broadcast_lane(const void* p) {
    std::int32_t lane;
    std::memcpy(&lane, p, 4);
    return _mm512_set1_epi32(lane);
}

constexpr int kMaxByteRows = 8;   // rows × 1 vector of accumulators, for weights that are unpacked in registers
constexpr int kTileByteRows = 6;  // the same × kByteVectors, for bytes in a cache
constexpr int kByteVectors = 2;

inline IntSums broadcast_ints(const std::int32_t* p) { return (IntSums)_mm512_set1_epi32(*p); }
inline void store_ints(void* p, Ints x) { _mm512_storeu_si512(p, x); }
inline Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }

// Each byte shifted right, or left if Right is negative, of which the bits of the mask are kept.
template <int Right> inline Ints bits_at(Ints x, int mask) {
    const Ints shifted = Right > 0 ? _mm512_srli_epi16(x, std::max(Right, 0)) : _mm512_slli_epi16(x, std::max(-Right, 0));
    return _mm512_and_si512(Right == 0 ? x : shifted, _mm512_set1_epi8(char(mask)));
}

// table[x] for each byte of x, from 0 to 15; table is aligned to 16 bytes.
inline Ints look_up(const std::uint8_t* table, Ints x) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), x);
}

#ifdef __AVX512VNNI__

// What is added to int8 weights when they are packed: one operand of VPDPBUSD has no sign.
constexpr int kWeightOffset = 128;
constexpr bool kSplitSums = false;

// acc + a × w in each lane; a are 4 int8 for all lanes.
template <Dot> inline IntSums multiply_quads(IntSums acc, const std::int8_t* a, Ints w) {
    return (IntSums)_mm512_dpbusd_epi32((Ints)acc, w, broadcast_lane(a));
}
template <Dot> inline IntSums finish_quads(IntSums acc) { return acc; }

#else

constexpr int kWeightOffset = 0;
// Small sums have halves of a lane: products of inputs 0 and 1 of each 4 in the one, of 2 and 3 in the other. Less the zero
// times the inputs' sum, a weight is at most 15 in magnitude, so no half leaves 16 bits.
constexpr bool kSplitSums = true;

// acc + a × w in each lane; a are 4 int8 for all lanes, from -127 to 127: a sum of two products fits in 16 bits.
template <Dot dot> inline IntSums multiply_quads(IntSums acc, const std::int8_t* a, Ints w) {
    Ints x = broadcast_lane(a);
    if (dot == Dot::kSmall) return (IntSums)_mm512_add_epi16((Ints)acc, _mm512_maddubs_epi16(w, x));
    if (dot == Dot::kSigned) {
        x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), zero_ints(), x);
        w = _mm512_abs_epi8(w);
    }
    return (IntSums)add((Ints)acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}
template <Dot dot> inline IntSums finish_quads(IntSums acc) {
    return dot == Dot::kSmall ? (IntSums)_mm512_madd_epi16((Ints)acc, _mm512_set1_epi16(1)) : acc;
}

#endif

// The sums of 16 int8, negative: of inputs 0 and 1 of each 4, and of 2 and 3.
inline void store_negative_sums(const std::int8_t* p, std::int16_t* sums) {
    __m128i four = _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    four = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0xb1));
    const std::int32_t both = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), four));
    std::memcpy(sums, &both, 4);
}

}  // namespace

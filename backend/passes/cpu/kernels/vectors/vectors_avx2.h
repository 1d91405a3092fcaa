// The vector layer for AVX2 with FMA and F16C: a vector is two registers. Included by vectors.h.

#pragma once

namespace {

struct Floats {
    __m256 lo, hi;
};
struct Ints {
    __m256i lo, hi;
};
struct Mask {
    __m256 lo, hi;
};
using IntSums = Ints;  // of products of int16

// 3 rows × 2 vectors of accumulators take 12 of the 16 registers.
constexpr int kMaxRows = 3;
constexpr int max_vectors(int rows) { return rows == 1 ? 4 : 2; }
constexpr int kWideRows = 6;  // rows × 1 vector in widened_product

inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats fmadd(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Floats fmsub(Floats a, Floats b, Floats c) {
    return {_mm256_fmsub_ps(a.lo, b.lo, c.lo), _mm256_fmsub_ps(a.hi, b.hi, c.hi)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Floats abs(Floats x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.lo), _mm256_andnot_ps(sign, x.hi)};
}
inline Floats round_to_even(Floats x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}
inline Floats truncate(Floats x) {
    constexpr int mode = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}
inline __m256 power_of_two(__m256 whole) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
// whole is from -126 to 127.
inline Floats times_power_of_two(Floats x, Floats whole) {
    return {_mm256_mul_ps(x.lo, power_of_two(whole.lo)), _mm256_mul_ps(x.hi, power_of_two(whole.hi))};
}
inline float sum(Floats x) {
    const __m256 eight = _mm256_add_ps(x.lo, x.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float largest(Floats x) {
    const __m256 eight = _mm256_max_ps(x.lo, x.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

inline Mask less_than(Floats a, Floats b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline __m256 lanes_between(__m256i lanes, i64 from, i64 to) {
    const __m256i first = _mm256_set1_epi32(int(std::clamp<i64>(from, 0, 16)) - 1);
    const __m256i end = _mm256_set1_epi32(int(std::clamp<i64>(to, 0, 16)));
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(lanes, first), _mm256_cmpgt_epi32(end, lanes)));
}
inline Mask lanes_between(i64 from, i64 to) {
    return {lanes_between(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), from, to),
            lanes_between(_mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15), from, to)};
}
inline std::uint32_t bits_of(Mask m) { return _mm256_movemask_ps(m.lo) | _mm256_movemask_ps(m.hi) << 8; }
inline Floats select(Mask m, Floats if_set, Floats if_clear) {
    return {_mm256_blendv_ps(if_clear.lo, if_set.lo, m.lo), _mm256_blendv_ps(if_clear.hi, if_set.hi, m.hi)};
}

inline __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline __m256i round_to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
}
inline const __m128i* eight(const std::uint16_t* p) { return reinterpret_cast<const __m128i*>(p); }

inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats load(const bf16* p) {
    return {widen(_mm_loadu_si128(eight(p))), widen(_mm_loadu_si128(eight(p + 8)))};
}
inline Floats load_halves(const Half* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(eight(p))), _mm256_cvtph_ps(_mm_loadu_si128(eight(p + 8)))};
}
template <class T> inline Floats load_part(const T* p, i64 count) {
    T part[16] = {};
    std::memcpy(part, p, count * sizeof(T));
    return load(part);
}
inline void store(float* p, Floats x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
inline void store(bf16* p, Floats x) {
    const __m256i packed = _mm256_packus_epi32(round_to_bf16(x.lo), round_to_bf16(x.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
template <class T> inline void store_part(T* p, Floats x, i64 count) {
    T part[16];
    store(part, x);
    std::memcpy(p, part, count * sizeof(T));
}

inline Half to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// Rounds to the nearest integers, ties to even; saturates.
inline __m256i to_shorts(Floats x) {
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
    return _mm256_permute4x64_epi64(packed, 0xd8);
}
inline void store_shorts(std::int16_t* p, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_shorts(x));
}
inline void store_bytes(std::int8_t* p, Floats x) {
    const __m256i shorts = to_shorts(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1)));
}

// acc + a × b, where a is one 32-bit lane, broadcast, and b a vector of lanes.
inline Floats multiply_add(Floats acc, const float* a, Floats b) { return fmadd(broadcast(*a), b, acc); }
inline __m256 low_of(__m256 pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16)); }
inline __m256 high_of(__m256 pairs) {
    return _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(std::int32_t(0xffff0000))));
}
inline Floats multiply_add(Floats acc, const bf16* a, Floats b) {
    acc = fmadd(broadcast(to_float(a[0])), {low_of(b.lo), low_of(b.hi)}, acc);
    return fmadd(broadcast(to_float(a[1])), {high_of(b.lo), high_of(b.hi)}, acc);
}

// Widens 16 pairs: their first numbers, then their second ones.
inline void store_pairs(float* p, const bf16* pairs) {
    const Floats both = load(reinterpret_cast<const float*>(pairs));
    store(p, {low_of(both.lo), low_of(both.hi)});
    store(p + 16, {high_of(both.lo), high_of(both.hi)});
}

// The maximum of the absolute values' bits: as integers they order finite numbers, infinity and NaN.
inline Ints max_bits(Ints top, Floats x) {
    const Floats size = abs(x);
    return {_mm256_max_epi32(top.lo, _mm256_castps_si256(size.lo)),
            _mm256_max_epi32(top.hi, _mm256_castps_si256(size.hi))};
}
inline std::int32_t largest(Ints x) {
    const __m256i eight = _mm256_max_epi32(x.lo, x.hi);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

inline Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
// Loads 16 pairs of int8 as int16.
inline Ints load_pairs(const std::int8_t* p) {
    const __m128i* sixteen = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(sixteen)), _mm256_cvtepi8_epi16(_mm_loadu_si128(sixteen + 1))};
}
// 16 int8 as floats.
inline Floats load_bytes(const std::int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return to_floats(Ints{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
inline IntSums multiply_add(IntSums acc, const std::int16_t* a, Ints b) {
    std::int32_t pair;
    std::memcpy(&pair, a, 4);
    const __m256i both = _mm256_set1_epi32(pair);
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(both, b.lo)),
            _mm256_add_epi32(acc.hi, _mm256_madd_epi16(both, b.hi))};
}

inline Ints load_ints(const void* p) {
    const __m256i* eight = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(eight), _mm256_loadu_si256(eight + 1)};
}
inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline __m256i broadcast_lane(const void* p) {
    std::int32_t lane;
    std::memcpy(&lane, p, 4);
    return _mm256_set1_epi32(lane);
}

// What is added to int8 weights when they are packed.
constexpr int kWeightOffset = 0;
constexpr int kMaxByteRows = 4;   // rows × 1 vector of accumulators, for weights that are unpacked in registers
constexpr int kTileByteRows = 4;  // the same × kByteVectors, for bytes in a cache
constexpr int kByteVectors = 1;
// Small sums have halves of a lane: products of inputs 0 and 1 of each 4 in the one, of 2 and 3 in the other. Less the zero
// times the inputs' sum, a weight is at most 15 in magnitude, so no half leaves 16 bits.
constexpr bool kSplitSums = true;

inline Ints broadcast_ints(const std::int32_t* p) { return {_mm256_set1_epi32(*p), _mm256_set1_epi32(*p)}; }
inline void store_ints(void* p, Ints x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), x.lo);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.hi);
}
inline Ints either(Ints a, Ints b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }

// Each byte shifted right, or left if Right is negative, of which the bits of the mask are kept.
template <int Right> inline Ints bits_at(Ints x, int mask) {
    const auto half = [&](__m256i y) {
        const __m256i shifted = Right > 0 ? _mm256_srli_epi16(y, std::max(Right, 0)) : _mm256_slli_epi16(y, std::max(-Right, 0));
        return _mm256_and_si256(Right == 0 ? y : shifted, _mm256_set1_epi8(char(mask)));
    };
    return {half(x.lo), half(x.hi)};
}

// table[x] for each byte of x, from 0 to 15; table is aligned to 16 bytes.
inline Ints look_up(const std::uint8_t* table, Ints x) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(both, x.lo), _mm256_shuffle_epi8(both, x.hi)};
}

// acc + a × w in each lane; a are 4 int8 for all lanes, from -127 to 127: a sum of two products fits in 16 bits.
template <Dot dot> inline Ints multiply_quads(Ints acc, const std::int8_t* a, Ints w) {
    const __m256i x = broadcast_lane(a), ones = _mm256_set1_epi16(1);
    if (dot == Dot::kSmall) {
        acc = {_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(w.lo, x)),
               _mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(w.hi, x))};
        // GCC reorders these additions otherwise, and the sums do not stay in registers.
        asm("" : "+x"(acc.lo), "+x"(acc.hi));
        return acc;
    }
    const auto quads = [&](__m256i y) {
        const __m256i products = dot == Dot::kSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(y), _mm256_sign_epi8(x, y))
                                                     : _mm256_maddubs_epi16(y, x);
        return _mm256_madd_epi16(products, ones);
    };
    return {_mm256_add_epi32(acc.lo, quads(w.lo)), _mm256_add_epi32(acc.hi, quads(w.hi))};
}
template <Dot dot> inline Ints finish_quads(Ints acc) {
    const __m256i ones = _mm256_set1_epi16(1);
    return dot == Dot::kSmall ? Ints{_mm256_madd_epi16(acc.lo, ones), _mm256_madd_epi16(acc.hi, ones)} : acc;
}

// The sums of 16 int8, negative: of inputs 0 and 1 of each 4, and of 2 and 3.
inline void store_negative_sums(const std::int8_t* p, std::int16_t* sums) {
    __m128i four = _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    four = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0xb1));
    const std::int32_t both = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), four));
    std::memcpy(sums, &both, 4);
}

}  // namespace

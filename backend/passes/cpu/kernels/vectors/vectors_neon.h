// The vector layer for NEON of ARMv8: a vector is four registers. Uses the instructions for bf16 and for dot products of
// int8 if the machine has them.
// Included by vectors.h.

#pragma once

namespace {

struct Floats {
    float32x4_t a, b, c, d;
};
struct Ints {
    int32x4_t a, b, c, d;
};
struct Mask {
    uint32x4_t a, b, c, d;
};
using IntSums = Ints;  // of products of int16

// 6 rows × 1 vector of accumulators take 24 of the 32 registers.
constexpr int kMaxRows = 6;
constexpr int max_vectors(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
constexpr int kWideRows = 0;  // no widened_product

// {f(x.a, …), f(x.b, …), f(x.c, …), f(x.d, …)}
template <class Result = Floats, class F, class... Vectors> inline Result each(const F& f, const Vectors&... x) {
    return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}

inline Floats broadcast(float x) {
    const float32x4_t four = vdupq_n_f32(x);
    return {four, four, four, four};
}
inline Floats add(Floats x, Floats y) {
    return each([](float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }, x, y);
}
inline Floats sub(Floats x, Floats y) {
    return each([](float32x4_t a, float32x4_t b) { return vsubq_f32(a, b); }, x, y);
}
inline Floats mul(Floats x, Floats y) {
    return each([](float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }, x, y);
}
inline Floats div(Floats x, Floats y) {
    return each([](float32x4_t a, float32x4_t b) { return vdivq_f32(a, b); }, x, y);
}
inline Floats fmadd(Floats x, Floats y, Floats z) {
    return each([](float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }, x, y, z);
}
inline Floats fmsub(Floats x, Floats y, Floats z) {
    return each([](float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(vnegq_f32(c), a, b); }, x, y, z);
}
inline Floats max(Floats x, Floats y) {
    return each([](float32x4_t a, float32x4_t b) { return vmaxq_f32(a, b); }, x, y);
}
inline Floats abs(Floats x) {
    return each([](float32x4_t a) { return vabsq_f32(a); }, x);
}
inline Floats round_to_even(Floats x) {
    return each([](float32x4_t a) { return vrndnq_f32(a); }, x);
}
inline Floats truncate(Floats x) {
    return each([](float32x4_t a) { return vrndq_f32(a); }, x);
}
// whole is from -126 to 127.
inline Floats times_power_of_two(Floats x, Floats whole) {
    return each(
        [](float32x4_t a, float32x4_t n) {
            const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
            return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
        },
        x, whole);
}
// In AVX2's order.
inline float sum(Floats x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(vpadd_f32(two, two), 0);
}
inline float largest(Floats x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.c), vmaxq_f32(x.b, x.d))); }

inline Mask less_than(Floats x, Floats y) {
    return each<Mask>([](float32x4_t a, float32x4_t b) { return vcltq_f32(a, b); }, x, y);
}
inline Mask lanes_between(i64 from, i64 to) {
    const int32x4_t first = vdupq_n_s32(int(std::clamp<i64>(from, 0, 16)));
    const int32x4_t end = vdupq_n_s32(int(std::clamp<i64>(to, 0, 16)));
    const Ints lanes = {{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}};
    return each<Mask>([&](int32x4_t lane) { return vandq_u32(vcgeq_s32(lane, first), vcltq_s32(lane, end)); }, lanes);
}
inline std::uint32_t bits_of(uint32x4_t m) {
    const uint32x4_t weights = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(m, weights));
}
inline std::uint32_t bits_of(Mask m) { return bits_of(m.a) | bits_of(m.b) << 4 | bits_of(m.c) << 8 | bits_of(m.d) << 12; }
inline Floats select(Mask m, Floats if_set, Floats if_clear) {
    return each([](uint32x4_t mask, float32x4_t a, float32x4_t b) { return vbslq_f32(mask, a, b); }, m, if_set, if_clear);
}

inline float32x4_t widen(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
inline uint16x4_t round_to_bf16(float32x4_t x) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000)), 16);
#endif
}

inline Floats load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline Floats load(const bf16* p) {
    return {widen(vld1_u16(p)), widen(vld1_u16(p + 4)), widen(vld1_u16(p + 8)), widen(vld1_u16(p + 12))};
}
inline float32x4_t widen_halves(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline Floats load_halves(const Half* p) {
    return {widen_halves(p), widen_halves(p + 4), widen_halves(p + 8), widen_halves(p + 12)};
}
template <class T> inline Floats load_part(const T* p, i64 count) {
    T part[16] = {};
    std::memcpy(part, p, count * sizeof(T));
    return load(part);
}
inline void store(float* p, Floats x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
inline void store(bf16* p, Floats x) {
    vst1q_u16(p, vcombine_u16(round_to_bf16(x.a), round_to_bf16(x.b)));
    vst1q_u16(p + 8, vcombine_u16(round_to_bf16(x.c), round_to_bf16(x.d)));
}
template <class T> inline void store_part(T* p, Floats x, i64 count) {
    T part[16];
    store(part, x);
    std::memcpy(p, part, count * sizeof(T));
}

inline Half to_half(float x) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0); }

// Rounds to the nearest integers, ties to even; saturates.
inline int16x8_t to_shorts(float32x4_t x, float32x4_t y) {
    return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x)), vqmovn_s32(vcvtnq_s32_f32(y)));
}
inline void store_shorts(std::int16_t* p, Floats x) {
    vst1q_s16(p, to_shorts(x.a, x.b));
    vst1q_s16(p + 8, to_shorts(x.c, x.d));
}
inline void store_bytes(std::int8_t* p, Floats x) {
    vst1q_s8(p, vcombine_s8(vqmovn_s16(to_shorts(x.a, x.b)), vqmovn_s16(to_shorts(x.c, x.d))));
}

// One 32-bit lane, without a broadcast: products take their factor from it.
inline float32x2_t load_lane(const void* p) {
    float lane;
    std::memcpy(&lane, p, 4);
    return float32x2_t{lane, 0.0f};
}
// acc + a × b, where a is one 32-bit lane and b a vector of lanes.
inline Floats multiply_add(Floats acc, const float* a, Floats b) {
    const float32x2_t factor = load_lane(a);
    return each([&](float32x4_t sums, float32x4_t x) { return vfmaq_lane_f32(sums, x, factor, 0); }, acc, b);
}
// The instructions for bf16 add the first numbers' products, then the second numbers', with one rounding each: the same
// bits as without them.
inline Floats multiply_add(Floats acc, const bf16* a, Floats b) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    const bfloat16x4_t factors = vreinterpret_bf16_f32(load_lane(a));
    return each(
        [&](float32x4_t sums, float32x4_t x) {
            const bfloat16x8_t pairs = vreinterpretq_bf16_f32(x);
            return vbfmlaltq_lane_f32(vbfmlalbq_lane_f32(sums, pairs, factors, 0), pairs, factors, 1);
        },
        acc, b);
#else
    const float32x4_t factors = widen(vreinterpret_u16_f32(load_lane(a)));
    return each(
        [&](float32x4_t sums, float32x4_t x) {
            const uint32x4_t pairs = vreinterpretq_u32_f32(x);
            sums = vfmaq_laneq_f32(sums, vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)), factors, 0);
            return vfmaq_laneq_f32(sums, vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000))), factors, 1);
        },
        acc, b);
#endif
}

// The maximum of the absolute values' bits: as integers they order finite numbers, infinity and NaN.
inline Ints max_bits(Ints top, Floats x) {
    return each<Ints>([](int32x4_t a, float32x4_t b) { return vmaxq_s32(a, vreinterpretq_s32_f32(vabsq_f32(b))); }, top,
                      x);
}
inline std::int32_t largest(Ints x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.b), vmaxq_s32(x.c, x.d))); }

inline Ints zero_ints() {
    const int32x4_t zeros = vdupq_n_s32(0);
    return {zeros, zeros, zeros, zeros};
}
inline Floats to_floats(Ints x) {
    return each([](int32x4_t a) { return vcvtq_f32_s32(a); }, x);
}
// Loads 16 pairs of int8 as int16: the pairs' first numbers in a and b, the second numbers in c and d.
inline Ints load_pairs(const std::int8_t* p) {
    const int8x16x2_t sides = vld2q_s8(p);
    const auto low = [](int8x16_t x) { return vreinterpretq_s32_s16(vmovl_s8(vget_low_s8(x))); };
    const auto high = [](int8x16_t x) { return vreinterpretq_s32_s16(vmovl_high_s8(x)); };
    return {low(sides.val[0]), high(sides.val[0]), low(sides.val[1]), high(sides.val[1])};
}
// 16 int8 as floats.
inline Floats load_bytes(const std::int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return to_floats(Ints{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)),
                          vmovl_high_s16(high)});
}
inline IntSums multiply_add(IntSums acc, const std::int16_t* a, Ints b) {
    const int16x4_t factors = vreinterpret_s16_f32(load_lane(a));
    const auto low = [&](int32x4_t sums, int32x4_t first, int32x4_t second) {
        sums = vmlal_lane_s16(sums, vget_low_s16(vreinterpretq_s16_s32(first)), factors, 0);
        return vmlal_lane_s16(sums, vget_low_s16(vreinterpretq_s16_s32(second)), factors, 1);
    };
    const auto high = [&](int32x4_t sums, int32x4_t first, int32x4_t second) {
        sums = vmlal_high_lane_s16(sums, vreinterpretq_s16_s32(first), factors, 0);
        return vmlal_high_lane_s16(sums, vreinterpretq_s16_s32(second), factors, 1);
    };
    return {low(acc.a, b.a, b.c), high(acc.b, b.a, b.c), low(acc.c, b.b, b.d), high(acc.d, b.b, b.d)};
}

inline Ints load_ints(const void* p) {
    const auto four = [&](int n) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const std::uint8_t*>(p) + 16 * n)); };
    return {four(0), four(1), four(2), four(3)};
}
inline Ints add(Ints x, Ints y) {
    return each<Ints>([](int32x4_t a, int32x4_t b) { return vaddq_s32(a, b); }, x, y);
}
inline Ints broadcast_int(std::int32_t x) {
    const int32x4_t four = vdupq_n_s32(x);
    return {four, four, four, four};
}

// What is added to int8 weights when they are packed.
constexpr int kWeightOffset = 0;
constexpr int kMaxByteRows = 5;   // rows × 1 vector of accumulators, for weights that are unpacked in registers
constexpr int kTileByteRows = 5;  // the same × kByteVectors, for bytes in a cache
constexpr int kByteVectors = 1;
constexpr bool kSplitSums = false;

inline Ints broadcast_ints(const std::int32_t* p) { return broadcast_int(*p); }
inline void store_ints(void* p, Ints x) {
    const auto four = [&](int n, int32x4_t y) { vst1q_u8(static_cast<std::uint8_t*>(p) + 16 * n, vreinterpretq_u8_s32(y)); };
    four(0, x.a), four(1, x.b), four(2, x.c), four(3, x.d);
}
inline Ints either(Ints x, Ints y) {
    return each<Ints>([](int32x4_t a, int32x4_t b) { return vorrq_s32(a, b); }, x, y);
}

// Each byte shifted right, or left if Right is negative, of which the bits of the mask are kept.
template <int Right> inline Ints bits_at(Ints x, int mask) {
    return each<Ints>(
        [&](int32x4_t a) {
            const uint8x16_t bytes = vreinterpretq_u8_s32(a);
            const uint8x16_t shifted = vshlq_u8(bytes, vdupq_n_s8(-Right));
            return vreinterpretq_s32_u8(vandq_u8(shifted, vdupq_n_u8(std::uint8_t(mask))));
        },
        x);
}

// table[x] for each byte of x, from 0 to 15.
inline Ints look_up(const std::uint8_t* table, Ints x) {
    const uint8x16_t entries = vld1q_u8(table);
    return each<Ints>(
        [&](int32x4_t a) { return vreinterpretq_s32_u8(vqtbl1q_u8(entries, vreinterpretq_u8_s32(a))); }, x);
}

// acc + a × w in each lane; a are 4 int8 for all lanes, from -127 to 127: a sum of two products fits in 16 bits.
template <Dot> inline Ints multiply_quads(Ints acc, const std::int8_t* a, Ints w) {
#ifdef __ARM_FEATURE_DOTPROD
    const int8x8_t factors = vreinterpret_s8_f32(load_lane(a));
    acc = each<Ints>(
        [&](int32x4_t sums, int32x4_t x) { return vdotq_lane_s32(sums, vreinterpretq_s8_s32(x), factors, 0); }, acc, w);
#else
    const int8x16_t factors = vreinterpretq_s8_f32(vdupq_lane_f32(load_lane(a), 0));
    acc = each<Ints>(
        [&](int32x4_t sums, int32x4_t x) {
            const int8x16_t bytes = vreinterpretq_s8_s32(x);
            const int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(factors));
            return vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(bytes, factors)));
        },
        acc, w);
#endif
    // GCC reorders these additions otherwise, and the sums do not stay in registers.
    asm("" : "+w"(acc.a), "+w"(acc.b), "+w"(acc.c), "+w"(acc.d));
    return acc;
}
template <Dot> inline Ints finish_quads(Ints acc) { return acc; }

// The sums of 16 int8, negative: of inputs 0 and 1 of each 4, and of 2 and 3.
inline void store_negative_sums(const std::int8_t* p, std::int16_t* sums) {
    const int16x8_t pairs = vpaddlq_s8(vld1q_s8(p));
    const int16x4_t four = vadd_s16(vget_low_s16(pairs), vget_high_s16(pairs));
    sums[0] = std::int16_t(-(vget_lane_s16(four, 0) + vget_lane_s16(four, 2)));
    sums[1] = std::int16_t(-(vget_lane_s16(four, 1) + vget_lane_s16(four, 3)));
}

}  // namespace

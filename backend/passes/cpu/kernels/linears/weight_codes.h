// The values of quantised weights: how a unit of 32 inputs lies in a strip, and what multiplies it.
//
//   unit of 8 bits   [8][16][4]: four inputs of each output, + kWeightOffset
//   other units      planes of 4 bits, of 2 bits, of 1 bit, as many as the bits of a value need, most bits lowest:
//     4 bits   [4][16][4]: byte n of output o has input 8 p + n in its low bits and input 8 p + n + 4 in its high ones
//     2 bits   [2][16][4]: byte n has inputs 16 p + n, + 4, + 8 and + 12, from the low bits on
//     1 bit    [16][4]: byte n has inputs n, n + 4, … n + 28
//
// A quad is what one instruction multiplies: inputs 4 q to 4 q + 3 of 16 outputs.

#pragma once

#include "linears/quantized_rows.h"

namespace {

alignas(16) constexpr std::uint8_t kE2m1Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int kE2m1Zero = 12;  // twice the number is the value less this, so the scale is half of the weight's
constexpr int kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct Iq4Table {
    alignas(16) std::uint8_t values[16];
    constexpr Iq4Table() : values() {
        for (int n = 0; n < 16; ++n) values[n] = std::uint8_t(kIq4Values[n] + kWeightOffset);
    }
};
constexpr Iq4Table kIq4Table;

constexpr i64 unit_bytes(i64 bits) { return bits * kUnit * kStrip / 8; }

template <int Bits, Codebook Book = kIntegers> struct Code {
    static constexpr i64 kUnitBytes = unit_bytes(Bits);
    static constexpr Dot kDot = Bits == 8 || Book == kIq4 ? Dot::kSigned : Bits <= 4 ? Dot::kSmall : Dot::kUnsigned;

    [[gnu::always_inline]] static Ints quad(const std::uint8_t* unit, int q) {
        if constexpr (Bits == 8) return load_ints(unit + 64 * q);
        Ints value = zero_ints();
        if constexpr (Bits >= 4) {
            const Ints pairs = load_ints(unit + 64 * (q / 2));
            value = q % 2 ? bits_at<4>(pairs, 15) : bits_at<0>(pairs, 15);
            if constexpr (Book == kE2m1) value = look_up(kE2m1Values, value);
            if constexpr (Book == kIq4) value = look_up(kIq4Table.values, value);
        }
        constexpr int low = Bits & 4, two = low ? 256 : 0;
        if constexpr ((Bits & 2) != 0) {
            const Ints fours = load_ints(unit + two + 64 * (q / 4));
            Ints high = zero_ints();
            switch (q % 4) {
                case 0: high = bits_at<0 - low>(fours, 3 << low); break;
                case 1: high = bits_at<2 - low>(fours, 3 << low); break;
                case 2: high = bits_at<4 - low>(fours, 3 << low); break;
                default: high = bits_at<6 - low>(fours, 3 << low);
            }
            value = low ? either(value, high) : high;
        }
        if constexpr ((Bits & 1) != 0) {
            constexpr int place = Bits - 1 == 4 ? 4 : 2, one = two + (Bits & 2 ? 128 : 0);
            const Ints eights = load_ints(unit + one);
            Ints high = zero_ints();
            switch (q) {
                case 0: high = bits_at<0 - place>(eights, 1 << place); break;
                case 1: high = bits_at<1 - place>(eights, 1 << place); break;
                case 2: high = bits_at<2 - place>(eights, 1 << place); break;
                case 3: high = bits_at<3 - place>(eights, 1 << place); break;
                case 4: high = bits_at<4 - place>(eights, 1 << place); break;
                case 5: high = bits_at<5 - place>(eights, 1 << place); break;
                case 6: high = bits_at<6 - place>(eights, 1 << place); break;
                default: high = bits_at<7 - place>(eights, 1 << place);
            }
            value = either(value, high);
        }
        return value;
    }
};

// What a stored value exceeds its meaning by, once it is a byte of a quad.
inline int zero_of(const Packing& packing) {
    if (packing.bits == 8 || packing.codebook == kIq4) return kWeightOffset;
    if (packing.codebook == kE2m1) return kE2m1Zero;
    return packing.minima == kNoMinima ? 1 << (packing.bits - 1) : 0;
}

inline bool is_small(const Packing& packing) { return packing.bits <= 4 && packing.codebook != kIq4; }

// Calls body(Code<…>) with the code of a packing.
template <class F> inline void with_code(const Packing& packing, const F& body) {
    switch (packing.bits) {
        case 2: return body(Code<2>{});
        case 3: return body(Code<3>{});
        case 4:
            switch (packing.codebook) {
                case kE2m1: return body(Code<4, kE2m1>{});
                case kIq4: return body(Code<4, kIq4>{});
                default: return body(Code<4>{});
            }
        case 5: return body(Code<5>{});
        case 6: return body(Code<6>{});
        default: return body(Code<8>{});
    }
}

// Writes values[32], stored values of one output, to its lane of a unit of zeros.
inline void store_unit(i64 bits, const std::uint8_t* values, std::uint8_t* unit, i64 lane) {
    unit += 4 * lane;
    if (bits == 8) {
        for (i64 q = 0; q < 8; ++q) std::memcpy(unit + 64 * q, values + 4 * q, 4);
        return;
    }
    std::uint32_t quads[8];
    std::memcpy(quads, values, sizeof quads);
    const auto put = [&](i64 plane, i64 p, std::uint32_t word) { std::memcpy(unit + plane + 64 * p, &word, 4); };
    i64 plane = 0, done = 0;
    if (bits >= 4) {
        for (i64 p = 0; p < 4; ++p) put(0, p, (quads[2 * p] & 0x0f0f0f0f) | (quads[2 * p + 1] & 0x0f0f0f0f) << 4);
        plane = 256, done = 4;
    }
    if (bits & 2) {
        for (i64 p = 0; p < 2; ++p) {
            std::uint32_t word = 0;
            for (i64 n = 0; n < 4; ++n) word |= (quads[4 * p + n] >> done & 0x03030303) << 2 * n;
            put(plane, p, word);
        }
        plane += 128, done += 2;
    }
    if (bits & 1) {
        std::uint32_t word = 0;
        for (i64 n = 0; n < 8; ++n) word |= (quads[n] >> done & 0x01010101) << n;
        put(plane, 0, word);
    }
}

// The bytes of the quads of one output's unit, after the codebook.
inline void load_unit(const Packing& packing, const std::uint8_t* unit, i64 lane, std::uint8_t* values) {
    with_code(packing, [&](auto code) {
        for (int q = 0; q < 8; ++q) {
            alignas(64) std::uint8_t bytes[64];
            store_ints(bytes, decltype(code)::quad(unit, q));
            std::memcpy(values + 4 * q, bytes + 4 * lane, 4);
        }
    });
}

}  // namespace

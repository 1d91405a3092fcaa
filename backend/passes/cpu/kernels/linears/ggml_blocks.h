// Weights in GGML's blocks, as a GGUF file has them, packed without an array of their numbers.
//
// A block has 32 or 256 values of one output. Its factors are binary16; integers that multiply them have 4 to 8 bits. The
// values become stored values of quantized_weights.h, which count from 0 on, and int8 + kWeightOffset in 8 bits.

#pragma once

#include "linears/quantized_weights.h"

namespace {

// What a block has beside its values.
struct BlockHead {
    Half factors[2];                   // scale and minimum, as of a group or of its block
    std::uint8_t multipliers[2][16];   // of the scales and of the minima, for each group; both in a byte if it has 4 bits each
};

inline Half half_at(const std::uint8_t* p) {
    Half half;
    std::memcpy(&half, p, sizeof half);
    return half;
}

// n bytes → their n low halves, then their n high ones
template <i64 n> void split_nibbles(const std::uint8_t* bytes, std::uint8_t* values) {
    for (i64 i = 0; i < n; ++i) values[i] = bytes[i] & 15;
    for (i64 i = 0; i < n; ++i) values[n + i] = bytes[i] >> 4;
}

// 64 bytes → 256 values: of each 32 bytes the lowest two bits, then the next two, …
inline void split_pairs_of_bits(const std::uint8_t* bytes, std::uint8_t* values) {
    for (i64 part = 0; part < 2; ++part)
        for (i64 n = 0; n < 4; ++n)
            for (i64 i = 0; i < 32; ++i) values[128 * part + 32 * n + i] = bytes[32 * part + i] >> 2 * n & 3;
}

// Adds 16 to the values whose bit is set in 4 bytes.
inline void add_fifth_bits(const std::uint8_t* bits, std::uint8_t* values) {
    for (i64 n = 0; n < 4; ++n) {
        const std::uint64_t picked = bits[n] * 0x0101010101010101 & 0x8040201008040201;  // bit i in byte i
        const std::uint64_t high = (picked + 0x7f7f7f7f7f7f7f7f & 0x8080808080808080) >> 3;
        std::uint64_t eight;
        std::memcpy(&eight, values + 8 * n, 8);
        eight |= high;
        std::memcpy(values + 8 * n, &eight, 8);
    }
}

// Adds a bit of 32 bytes to 256 values: the lowest bits to the first 32.
inline void add_planes(const std::uint8_t* bits, int place, std::uint8_t* values) {
    for (i64 n = 0; n < 8; ++n)
        for (i64 i = 0; i < 32; ++i) values[32 * n + i] |= (bits[i] >> n & 1) << place;
}

// Each type has its number in GGML, the bytes and values of a block, and the packing's bits. read() fills values[kValues].

template <i64 number, i64 bytes, i64 bits, i64 values = 32> struct BlockType {
    static constexpr i64 kNumber = number, kBytes = bytes, kBits = bits, kValues = values;
};

struct Q8_0 : BlockType<8, 34, 8> {
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        head.factors[0] = half_at(block);
        for (i64 i = 0; i < kValues; ++i) values[i] = std::uint8_t(block[2 + i] + kWeightOffset);
    }
};

// Q4_0, and IQ4_NL, whose values are places of a codebook.
template <i64 number> struct Nibbles : BlockType<number, 18, 4> {
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        head.factors[0] = half_at(block);
        split_nibbles<16>(block + 2, values);
    }
};

struct Q5_0 : BlockType<6, 22, 5> {
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        head.factors[0] = half_at(block);
        split_nibbles<16>(block + 6, values);
        add_fifth_bits(block + 2, values);
    }
};

// The second factor of Q4_1 and Q5_1 is added; a minimum is subtracted.
inline void read_scale_and_offset(const std::uint8_t* block, BlockHead& head) {
    head.factors[0] = half_at(block);
    head.factors[1] = half_at(block + 2) ^ 0x8000;
}

struct Q4_1 : BlockType<3, 20, 4> {
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        read_scale_and_offset(block, head);
        split_nibbles<16>(block + 4, values);
    }
};

struct Q5_1 : BlockType<7, 24, 5> {
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        read_scale_and_offset(block, head);
        split_nibbles<16>(block + 8, values);
        add_fifth_bits(block + 4, values);
    }
};

// The scale is a power of two, half of the block's because the packing's values are doubled. The exponent is from -24 to 15
// unless all values are 0; then any will do.
struct Mxfp4 : BlockType<39, 17, 4> {
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        bool is_used = false;
        for (i64 i = 1; i < kBytes; ++i) is_used |= block[i] & 0x77;
        const int exponent = is_used ? block[0] - 128 : -1;
        head.factors[0] = exponent < -14 ? Half(1 << (exponent + 24)) : Half(exponent + 15 << 10);
        split_nibbles<16>(block + 1, values);
    }
};

struct Q2K : BlockType<10, 84, 2, 256> {
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        head.factors[0] = half_at(block + 80);
        head.factors[1] = half_at(block + 82);
        std::memcpy(head.multipliers[0], block, 16);
        split_pairs_of_bits(block + 16, values);
    }
};

struct Q3K : BlockType<11, 110, 3, 256> {
    // Multipliers have 6 bits less 32: the lower 4 in 8 bytes, the upper 2 in 4 more.
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        head.factors[0] = half_at(block + 108);
        split_nibbles<8>(block + 96, head.multipliers[0]);
        for (i64 group = 0; group < 16; ++group) {
            const int upper = block[104 + group % 4] >> 2 * (group / 4) & 3;
            head.multipliers[0][group] = std::uint8_t((head.multipliers[0][group] | upper << 4) - 32);
        }
        split_pairs_of_bits(block + 32, values);
        add_planes(block, 2, values);
    }
};

// Q4_K and Q5_K. Multipliers have 6 bits. Bytes 0 to 3 have the first four of the scales, bytes 4 to 7 of the minima; the
// upper two bits of these belong to the last four, whose lower four are in bytes 8 to 11.
inline void read_scales_and_minima(const std::uint8_t* block, BlockHead& head) {
    const std::uint8_t* bytes = block + 4;
    head.factors[0] = half_at(block);
    head.factors[1] = half_at(block + 2);
    for (i64 i = 0; i < 4; ++i) {
        head.multipliers[0][i] = bytes[i] & 63;
        head.multipliers[1][i] = bytes[4 + i] & 63;
        head.multipliers[0][4 + i] = (bytes[8 + i] & 15) | bytes[i] >> 6 << 4;
        head.multipliers[1][4 + i] = bytes[8 + i] >> 4 | bytes[4 + i] >> 6 << 4;
    }
}

struct Q4K : BlockType<12, 144, 4, 256> {
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        read_scales_and_minima(block, head);
        for (i64 n = 0; n < 4; ++n) split_nibbles<32>(block + 16 + 32 * n, values + 64 * n);
    }
};

struct Q5K : BlockType<13, 176, 5, 256> {
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        read_scales_and_minima(block, head);
        for (i64 n = 0; n < 4; ++n) split_nibbles<32>(block + 48 + 32 * n, values + 64 * n);
        add_planes(block + 16, 4, values);
    }
};

struct Q6K : BlockType<14, 210, 6, 256> {
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        head.factors[0] = half_at(block + 208);
        std::memcpy(head.multipliers[0], block + 192, 16);
        for (i64 part = 0; part < 2; ++part) {
            split_nibbles<64>(block + 64 * part, values + 128 * part);
            for (i64 n = 0; n < 4; ++n)
                for (i64 i = 0; i < 32; ++i)
                    values[128 * part + 32 * n + i] |= (block[128 + 32 * part + i] >> 2 * n & 3) << 4;
        }
    }
};

struct Iq4Xs : BlockType<23, 136, 4, 256> {
    // Multipliers have 6 bits less 32: the upper 2 in bytes 2 and 3, the lower 4 in the next four.
    static void read(const std::uint8_t* block, std::uint8_t* values, BlockHead& head) {
        head.factors[0] = half_at(block);
        for (i64 group = 0; group < 8; ++group) {
            const int upper = block[2 + group / 4] >> 2 * (group % 4) & 3, lower = block[4 + group / 2] >> 4 * (group % 2) & 15;
            head.multipliers[0][group] = std::uint8_t((lower | upper << 4) - 32);
        }
        for (i64 n = 0; n < 8; ++n) split_nibbles<16>(block + 8 + 16 * n, values + 32 * n);
    }
};

// A block of one output → its lane of a block of a strip. Inlined, GCC reads vectors that it has just written in smaller
// parts, which takes three times as long.
template <class Type>
[[gnu::noinline]] void pack_block(const QuantizedLayout& layout, const std::uint8_t* block, std::uint8_t* packed, i64 lane) {
    alignas(64) std::uint8_t values[Type::kValues];
    BlockHead head;
    Type::read(block, values, head);
    const i64 kinds = 1 + (layout.packing.minima == kHalfMinima);
    for (i64 n = 0; n < kinds; ++n) reinterpret_cast<Half*>(packed)[n * kStrip + lane] = head.factors[n];
    if (Type::kValues > kUnit)
        for (i64 n = 0; n < layout.multiplier_bytes; ++n)
            for (i64 group = 0; group < layout.block_groups; ++group)
                packed[layout.multipliers + (n * layout.block_groups + group) * kStrip + lane] = head.multipliers[n][group];
    for (i64 unit = 0; unit < Type::kValues / kUnit; ++unit)
        store_unit(Type::kBits, values + unit * kUnit, packed + layout.header + unit * unit_bytes(Type::kBits), lane);
}

// content: the blocks of the part's rows, which are its outputs, or [gate | up].
template <class Type>
void pack_blocks_of(Engine& engine, const Linear& linear, i64 part, const std::uint8_t* content) {
    const WeightPart& weights = linear.parts[part];
    const QuantizedLayout layout(linear, weights.packing);
    const i64 panels = part_panels(linear, part), first_panel = weights.end_panel - panels;
    const i64 first_row = first_panel * panel_width(linear), row_bytes = layout.blocks * Type::kBytes;
    auto* packed = static_cast<std::uint8_t*>(const_cast<void*>(weights.packed));
    engine.pool.run(panels, [&](i64 panel, int) {
        std::uint8_t* strip = packed + panel * layout.panel_bytes();
        std::memset(strip, 0, layout.panel_bytes());
        for (i64 column = 0; column < kPanel; column += kStrip, strip += layout.strip_bytes) {
            const std::uint8_t* blocks[kStrip];
            for (i64 lane = 0; lane < kStrip; ++lane) {
                const i64 row = weight_row(linear, first_panel + panel, column + lane);
                blocks[lane] = row < 0 ? nullptr : content + (row - first_row) * row_bytes;
            }
            std::uint8_t* target = strip;
            for (i64 block = 0; block < layout.blocks; ++block, target += layout.block_bytes)
                for (i64 lane = 0; lane < kStrip; ++lane) {
                    if (blocks[lane] == nullptr) continue;
                    pack_block<Type>(layout, blocks[lane], target, lane);
                    blocks[lane] += Type::kBytes;
                }
        }
    });
}

inline void pack_blocks(Engine& engine, const Linear& linear, i64 part, i64 type, const std::uint8_t* content) {
    const auto pack = [&](auto... types) {
        ((type == decltype(types)::kNumber ? pack_blocks_of<decltype(types)>(engine, linear, part, content) : void()), ...);
    };
    pack(Nibbles<2>{}, Q4_1{}, Q5_0{}, Q5_1{}, Q8_0{}, Q2K{}, Q3K{}, Q4K{}, Q5K{}, Q6K{}, Nibbles<20>{}, Iq4Xs{}, Mxfp4{});
}

}  // namespace

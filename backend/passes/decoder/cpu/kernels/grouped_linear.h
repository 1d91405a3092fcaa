// Linears whose weights have a scale, and maybe a minimum, for each 16 or 32 inputs of an output: GGML's block types.
//
//   strip   [block]: inputs that share binary16 numbers, one group or several
//   block   scales    binary16 [16]
//           minima    binary16 [16], if has_minima
//           [group]
//   group   values       [inputs / 4][16][4]: int8 + kWeightOffset; of 4 bits [inputs / 8][16][4]: 8 inputs in 4 bytes, of
//                        which the first 4 are the low bits, from 0 to 15
//           multipliers  int8 [16] of the scales, then of the minima if there are any; where a block has several groups
//
// output = (sum over groups, ascending, of scale × float(sum of int8 × value), then of -minimum × float(sum of int8))
//          × scale of the row, where a group's scale and minimum are those of its block × its multipliers

#pragma once

#include "int4_linear.h"

namespace {

constexpr i64 kSixteen = 16;  // inputs of QuantizedRows::sixteen_sums

// Where the parts of blocks lie.
struct GroupedLayout {
    i64 bits, group_size, block_groups, blocks, has_minima, header, multipliers, group_bytes, block_bytes, strip_bytes;

    explicit GroupedLayout(const Linear& linear)
        : bits(linear.form == kGrouped4Weight ? 4 : 8), group_size(linear.group_size),
          block_groups(linear.block_size / linear.group_size), blocks(linear.inputs / linear.block_size),
          has_minima(linear.has_minima), header((1 + has_minima) * kStrip * i64(sizeof(Half))),
          multipliers(group_size * bits / 8 * kStrip),
          group_bytes(multipliers + (block_groups > 1 ? (1 + has_minima) * kStrip : 0)),
          block_bytes(header + block_groups * group_bytes), strip_bytes((blocks * block_bytes + 63) / 64 * 64) {}

    i64 panel_bytes() const { return kPanel / kStrip * strip_bytes; }
};

inline i64 grouped_bytes(const Linear& linear) { return num_panels(linear) * GroupedLayout(linear).panel_bytes(); }

// Fills rows.sixteen_sums.
inline void sum_sixteens(Engine& engine, i64 num_rows, i64 inputs) {
    QuantizedRows& rows = engine.quantized;
    const i64 stride = rows.inputs / kSixteen;
    if (i64(rows.sixteen_sums.size()) < num_rows * stride) rows.sixteen_sums.resize(num_rows * stride);
    engine.split(num_rows, std::max<i64>(1, 32768 / inputs), [&](i64 first, i64 last, int) {
        for (i64 r = first; r < last; ++r)
            for (i64 n = 0; n < stride; ++n) {
                const std::int8_t* values = rows.row(r) + n * kSixteen;
                std::int16_t sum = 0;
                for (i64 k = 0; k < kSixteen; ++k) sum = std::int16_t(sum + values[k]);
                rows.sixteen_sums[r * stride + n] = sum;
            }
    });
}

// c[R][64] = R rows × a strip.
template <int R, int Bits>
void multiply_grouped_strip(const QuantizedRows& rows, i64 row, const GroupedLayout& layout, const std::uint8_t* strip,
                            float* c) {
    constexpr bool needs_offset = Bits == 8 && kWeightOffset != 0;
    const std::int8_t* a = rows.row(row);
    const i64 sums_stride = rows.inputs / kSixteen, sixteens = layout.group_size / kSixteen;
    const std::int16_t* sums = rows.sixteen_sums.data() + row * sums_stride;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(c + r * kPanel, broadcast(0.0f));
    for (i64 block = 0; block < layout.blocks; ++block) {
        const Half* header = reinterpret_cast<const Half*>(strip);
        prefetch_ahead(strip);
        const Floats block_scale = load_halves(header);
        const Floats block_minimum = layout.has_minima ? load_halves(header + kStrip) : broadcast(0.0f);
        strip += layout.header;
        for (i64 group = 0; group < layout.block_groups; ++group, strip += layout.group_bytes, sums += sixteens) {
            std::int32_t group_sums[R];
            Ints acc[R];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const std::int16_t* own = sums + r * sums_stride;
                group_sums[r] = sixteens == 1 ? own[0] : own[0] + own[1];
                acc[r] = needs_offset ? broadcast_int(-kWeightOffset * group_sums[r]) : zero_ints();
            }
            for (const std::uint8_t* values = strip; values < strip + layout.multipliers; values += 4 * kStrip) {
                prefetch_ahead(values);
                const Ints w = load_ints(values);
                if constexpr (Bits == 8) {
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) acc[r] = dot4(acc[r], a + r * rows.inputs, w);
                    a += 4;
                } else {
                    const Ints low = low_nibbles(w), high = high_nibbles(w);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        acc[r] = small_dot4(acc[r], a + r * rows.inputs, low);
                        acc[r] = small_dot4(acc[r], a + r * rows.inputs + 4, high);
                    }
                    a += 8;
                }
            }
            Floats scale = block_scale, minimum = block_minimum;
            if (layout.block_groups > 1) {
                const auto* multipliers = reinterpret_cast<const std::int8_t*>(strip) + layout.multipliers;
                scale = mul(scale, load_bytes(multipliers));
                if (layout.has_minima) minimum = mul(minimum, load_bytes(multipliers + kStrip));
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Floats sum = to_floats(Bits == 8 ? acc[r] : finish_small(acc[r]));
                Floats total = fmadd(sum, scale, load(c + r * kPanel));
                if (layout.has_minima) total = fmadd(minimum, broadcast(-float(group_sums[r])), total);
                store(c + r * kPanel, total);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(c + r * kPanel, mul(load(c + r * kPanel), broadcast(rows.scales[row + r])));
}

template <int Bits>
[[gnu::noinline]]
void multiply_grouped_panel(const Engine& engine, const Linear& linear, i64 panel, i64 begin, i64 end, float* c) {
    const GroupedLayout layout(linear);
    const auto* weights = static_cast<const std::uint8_t*>(linear.packed) + panel * layout.panel_bytes();
    for (i64 column = 0; column < kPanel; column += kStrip)
        for_byte_rows(end - begin, [&](i64 row, auto num_rows) {
            multiply_grouped_strip<decltype(num_rows)::value, Bits>(engine.quantized, begin + row, layout,
                                                                    weights + column / kStrip * layout.strip_bytes,
                                                                    c + row * kPanel + column);
        });
}

// values: int8 [rows][inputs], or uint8 [rows][inputs / 2] with the even input in the low bits. factors: scales, then
// minima if there are any, [rows][blocks][1 or 2]; multipliers the same, [rows][groups], or null. Rows are the outputs, or
// [gate | up].
inline void pack_grouped(Engine& engine, const Linear& linear, const void* values, const float* factors,
                         const std::int8_t* multipliers) {
    const GroupedLayout layout(linear);
    const i64 groups = layout.blocks * layout.block_groups, step = layout.bits == 4 ? 8 : 4;
    const i64 kinds = 1 + layout.has_minima;
    auto* packed = static_cast<std::uint8_t*>(const_cast<void*>(linear.packed));
    engine.pool.run(num_panels(linear), [&](i64 panel, int) {
        std::uint8_t* target = packed + panel * layout.panel_bytes();
        std::memset(target, 0, layout.panel_bytes());
        for (i64 column = 0; column < kPanel; ++column) {
            const i64 row = weight_row(linear, panel, column), lane = column % kStrip;
            if (row < 0) continue;
            std::uint8_t* place = target + column / kStrip * layout.strip_bytes;
            for (i64 g = 0; g < groups; ++g, place += layout.group_bytes) {
                if (g % layout.block_groups == 0) {
                    const i64 block = row * layout.blocks + g / layout.block_groups;
                    auto* header = reinterpret_cast<Half*>(place);
                    for (i64 n = 0; n < kinds; ++n) header[n * kStrip + lane] = to_half(factors[block * kinds + n]);
                    place += layout.header;
                }
                for (i64 k = 0; k < layout.group_size; ++k) {
                    const i64 input = row * linear.inputs + g * layout.group_size + k;
                    std::uint8_t& byte = place[(k / step * kStrip + lane) * 4 + k % 4];
                    if (layout.bits == 8) {
                        byte = std::uint8_t(static_cast<const std::int8_t*>(values)[input] + kWeightOffset);
                    } else {
                        const int value = static_cast<const std::uint8_t*>(values)[input / 2] >> (k % 2 * 4) & 15;
                        byte |= std::uint8_t(k % 8 < 4 ? value : value << 4);
                    }
                }
                if (layout.block_groups == 1) continue;
                for (i64 n = 0; n < kinds; ++n)
                    place[layout.multipliers + n * kStrip + lane] =
                        std::uint8_t(multipliers[(row * groups + g) * kinds + n]);
            }
        }
    });
}

// The weights of one output, for a linear that is not gated.
inline void read_grouped_row(const Linear& linear, i64 output, float* out) {
    const GroupedLayout layout(linear);
    const i64 lane = output % kStrip, step = layout.bits == 4 ? 8 : 4;
    const auto* place = static_cast<const std::uint8_t*>(linear.packed) + output / kStrip * layout.strip_bytes;
    for (i64 block = 0; block < layout.blocks; ++block) {
        float scales[16], minima[16] = {};
        store(scales, load_halves(reinterpret_cast<const Half*>(place)));
        if (layout.has_minima) store(minima, load_halves(reinterpret_cast<const Half*>(place) + kStrip));
        place += layout.header;
        for (i64 group = 0; group < layout.block_groups; ++group, place += layout.group_bytes) {
            float scale = scales[lane], minimum = minima[lane];
            if (layout.block_groups > 1) {
                const auto* multipliers = reinterpret_cast<const std::int8_t*>(place) + layout.multipliers;
                scale *= multipliers[lane];
                if (layout.has_minima) minimum *= multipliers[kStrip + lane];
            }
            for (i64 k = 0; k < layout.group_size; ++k) {
                const int byte = place[(k / step * kStrip + lane) * 4 + k % 4];
                const int value = layout.bits == 8 ? std::int8_t(byte - kWeightOffset)
                                                   : (k % 8 < 4 ? byte & 15 : byte >> 4);
                *out++ = scale * float(value) - minimum;
            }
        }
    }
}

}  // namespace

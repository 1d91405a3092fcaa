// Linears with weights of 4 bits: one scale, and maybe one zero point, per output and group of 32 or 128 inputs.
//
//   strip   [group]
//   group   values  [inputs / 8][16][4]: 8 inputs in 4 bytes, of which the first 4 are the low bits
//           scales  binary16 [16]
//           zeros   uint8 [16], for kZeroPoints
//
// output = (sum over groups, ascending, of scale × float(sum of int8 × (value - zero))) × scale of the row
//
// The value of E2M1 is that of kE2m1Values, and its zero 12: twice the number, so the scale is half of the weight's.

#pragma once

#include "int8_linear.h"

namespace {

alignas(16) constexpr std::uint8_t kE2m1Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

constexpr int zero_of(Int4Kind kind) { return kind == kE2m1 ? 12 : 8; }

// Where the parts of groups lie.
struct Int4Layout {
    i64 groups, scales, zeros, group_bytes, strip_bytes;

    explicit Int4Layout(const Linear& linear)
        : groups(linear.inputs / linear.group_size), scales(linear.group_size / 8 * kStrip * 4),
          zeros(scales + kStrip * i64(sizeof(Half))), group_bytes(zeros + (linear.int4_kind == kZeroPoints ? kStrip : 0)),
          strip_bytes((groups * group_bytes + 63) / 64 * 64) {}

    i64 panel_bytes() const { return kPanel / kStrip * strip_bytes; }
};

inline i64 int4_bytes(const Linear& linear) { return num_panels(linear) * Int4Layout(linear).panel_bytes(); }

template <Int4Kind Kind> inline Ints values_of(Ints nibbles) {
    if constexpr (Kind == kE2m1) return look_up(kE2m1Values, nibbles);
    else return nibbles;
}

// c[R][64] = R rows × a strip with groups of 32 × Blocks inputs.
template <int R, int Blocks, Int4Kind Kind>
void multiply_strip(const QuantizedRows& rows, i64 row, const Int4Layout& layout, const std::uint8_t* strip, float* c) {
    const std::int8_t* a = rows.row(row);
    const i64 sums_stride = rows.inputs / kSumGroup * 2;
    const std::int16_t* sums = rows.group_sums.data() + row * sums_stride;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(c + r * kPanel, broadcast(0.0f));
    for (i64 group = 0; group < layout.groups; ++group, strip += layout.group_bytes) {
        prefetch_ahead(strip + layout.scales);
        const Ints zero = Kind == kZeroPoints ? load_zeros(strip + layout.zeros) : same_zeros(zero_of(Kind));
        const std::uint8_t* values = strip;
        Ints total[R];
#pragma GCC unroll 4
        for (int block = 0; block < Blocks; ++block, sums += 2) {
            Ints acc[R];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) acc[r] = start_small(zero, sums + r * sums_stride);
            for (int step = 0; step < 4; ++step, values += 4 * kStrip, a += 8) {
                prefetch_ahead(values);
                const Ints w = load_ints(values), low = values_of<Kind>(low_nibbles(w)),
                           high = values_of<Kind>(high_nibbles(w));
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    acc[r] = small_dot4(acc[r], a + r * rows.inputs, low);
                    acc[r] = small_dot4(acc[r], a + r * rows.inputs + 4, high);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Ints sum = finish_small(acc[r]);
                total[r] = block == 0 ? sum : add(total[r], sum);
            }
        }
        const Floats scale = load_halves(reinterpret_cast<const Half*>(strip + layout.scales));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            store(c + r * kPanel, fmadd(to_floats(total[r]), scale, load(c + r * kPanel)));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(c + r * kPanel, mul(load(c + r * kPanel), broadcast(rows.scales[row + r])));
}

template <Int4Kind kind> using KindConstant = std::integral_constant<Int4Kind, kind>;

// Calls body(Count<32-input blocks in a group>, KindConstant<its kind>). E2M1 has groups of 32.
template <class F> inline void with_int4_form(const Linear& linear, const F& body) {
    const auto with_blocks = [&](auto kind) { linear.group_size == 32 ? body(Count<1>{}, kind) : body(Count<4>{}, kind); };
    switch (linear.int4_kind) {
        case kE2m1: return body(Count<1>{}, KindConstant<kE2m1>{});
        case kZeroPoints: return with_blocks(KindConstant<kZeroPoints>{});
        default: return with_blocks(KindConstant<kSymmetric>{});
    }
}

[[gnu::noinline]]
inline void multiply_int4_panel(const Engine& engine, const Linear& linear, i64 panel, i64 begin, i64 end, float* c) {
    const Int4Layout layout(linear);
    const auto* weights = static_cast<const std::uint8_t*>(linear.packed) + panel * layout.panel_bytes();
    with_int4_form(linear, [&](auto blocks, auto kind) {
        for (i64 column = 0; column < kPanel; column += kStrip)
            for_byte_rows(end - begin, [&](i64 row, auto num_rows) {
                multiply_strip<decltype(num_rows)::value, decltype(blocks)::value, decltype(kind)::value>(
                    engine.quantized, begin + row, layout, weights + column / kStrip * layout.strip_bytes,
                    c + row * kPanel + column);
            });
    });
}

// values [rows][inputs / 2], scales and, for kZeroPoints, zeros [rows][groups], where rows are the outputs, or [gate | up].
inline void pack_int4(Engine& engine, const Linear& linear, const std::uint8_t* values, const float* scales,
                      const std::uint8_t* zeros) {
    const Int4Layout layout(linear);
    auto* packed = static_cast<std::uint8_t*>(const_cast<void*>(linear.packed));
    engine.pool.run(num_panels(linear), [&](i64 panel, int) {
        std::uint8_t* target = packed + panel * layout.panel_bytes();
        std::memset(target, 0, layout.panel_bytes());
        for (i64 column = 0; column < kPanel; ++column) {
            const i64 row = weight_row(linear, panel, column), lane = column % kStrip;
            if (row < 0) continue;
            std::uint8_t* group = target + column / kStrip * layout.strip_bytes;
            for (i64 g = 0; g < layout.groups; ++g, group += layout.group_bytes) {
                for (i64 k = 0; k < linear.group_size; ++k) {
                    const i64 input = g * linear.group_size + k;
                    const int value = values[(row * linear.inputs + input) / 2] >> (k % 2 * 4) & 15;
                    group[(k / 8 * kStrip + lane) * 4 + k % 4] |= std::uint8_t(k % 8 < 4 ? value : value << 4);
                }
                reinterpret_cast<Half*>(group + layout.scales)[lane] = to_half(scales[row * layout.groups + g]);
                if (linear.int4_kind == kZeroPoints) group[layout.zeros + lane] = zeros[row * layout.groups + g];
            }
        }
    });
}

// The weights of one output, for a linear that is not gated.
inline void read_int4_row(const Linear& linear, i64 output, float* out) {
    const Int4Layout layout(linear);
    const i64 lane = output % kStrip;
    const auto* group = static_cast<const std::uint8_t*>(linear.packed) + output / kStrip * layout.strip_bytes;
    for (i64 g = 0; g < layout.groups; ++g, group += layout.group_bytes) {
        float scales[16];
        store(scales, load_halves(reinterpret_cast<const Half*>(group + layout.scales)));
        const int zero = linear.int4_kind == kZeroPoints ? group[layout.zeros + lane] : zero_of(Int4Kind(linear.int4_kind));
        for (i64 k = 0; k < linear.group_size; ++k) {
            const int both = group[(k / 8 * kStrip + lane) * 4 + k % 4];
            const int nibble = k % 8 < 4 ? both & 15 : both >> 4;
            const int value = linear.int4_kind == kE2m1 ? kE2m1Values[nibble] : nibble;
            out[g * linear.group_size + k] = scales[lane] * float(value - zero);
        }
    }
}

}  // namespace

// Linears with int8 weights: one scale per output.
//
//   strip   [inputs / 4][16][4]: int8 + weight_offset; inputs are padded to a multiple of 64
//   scales  float [panels × 64], after the last panel
//
// output = float(sum of int8 × int8) × (scale of the row × scale of the output)

#pragma once

#include "quantized_rows.h"

namespace {

inline i64 int8_panel_bytes(const Linear& linear) { return padded_inputs(linear) * kPanel; }
inline i64 int8_bytes(const Linear& linear) {
    return num_panels(linear) * (int8_panel_bytes(linear) + kPanel * i64(sizeof(float)));
}
inline const float* int8_scales(const Linear& linear) {
    const auto* packed = static_cast<const std::int8_t*>(linear.packed);
    return reinterpret_cast<const float*>(packed + num_panels(linear) * int8_panel_bytes(linear));
}

// Tiles multiply signed numbers; vectors may want an offset.
inline int weight_offset(const Engine& engine) { return kHasTiles && engine.shape.uses_tiles ? 0 : kWeightOffset; }

inline Floats scale_sums(Ints sums, float row_scale, Floats scales) {
    return mul(to_floats(sums), mul(broadcast(row_scale), scales));
}

// c[R][64] = R rows × a strip.
template <int R>
void multiply_strip(const QuantizedRows& rows, i64 row, const std::int8_t* strip, const float* scales, float* c) {
    constexpr int chains = std::max(1, kByteChains / R);
    const std::int8_t* a = rows.row(row);
    Ints acc[R][chains];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < chains; ++n)
            acc[r][n] = n == 0 && kWeightOffset ? broadcast_int(-kWeightOffset * rows.sums[row + r]) : zero_ints();
    for (i64 k = 0; k < rows.inputs; k += 4 * chains)
#pragma GCC unroll 16
        for (int n = 0; n < chains; ++n) {
            prefetch_ahead(strip + (k + 4 * n) * kStrip);
            const Ints w = load_ints(strip + (k + 4 * n) * kStrip);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) acc[r][n] = dot4(acc[r][n], a + r * rows.inputs + k + 4 * n, w);
        }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int n = 1; n < chains; ++n) acc[r][0] = add(acc[r][0], acc[r][n]);
        store(c + r * kPanel, scale_sums(acc[r][0], rows.scales[row + r], load(scales)));
    }
}

[[gnu::noinline]]
inline void multiply_int8_panel(const Engine& engine, const Linear& linear, i64 panel, i64 begin, i64 end, float* c) {
    const auto* weights = static_cast<const std::int8_t*>(linear.packed) + panel * int8_panel_bytes(linear);
    const float* scales = int8_scales(linear) + panel * kPanel;
    const QuantizedRows& rows = engine.quantized;
    for (i64 column = 0; column < kPanel; column += kStrip)
        for_byte_rows(end - begin, [&](i64 row, auto num_rows) {
            multiply_strip<decltype(num_rows)::value>(rows, begin + row, weights + column * rows.inputs,
                                                      scales + column, c + row * kPanel + column);
        });
}

// The same on tiles. c has the sums until the last of them is added.
[[gnu::noinline]]
inline void multiply_int8_panel_on_tiles(const Engine& engine, const Linear& linear, i64 panel, i64 begin, i64 end,
                                         float* c) {
    const auto* weights = static_cast<const std::int8_t*>(linear.packed) + panel * int8_panel_bytes(linear);
    const float* scales = int8_scales(linear) + panel * kPanel;
    const QuantizedRows& rows = engine.quantized;
    const i64 part = end - begin > kTileRows ? kTilePanelSteps * 4 : rows.inputs;
    for (i64 k = 0; k < rows.inputs; k += part)
        byte_tile_product(end - begin, rows.row(begin) + k, rows.inputs, weights + k * kStrip, rows.inputs * kStrip,
                          std::min(part, rows.inputs - k), c, k > 0);
    for (i64 r = 0; r < end - begin; ++r)
        for (i64 column = 0; column < kPanel; column += kStrip) {
            float* target = c + r * kPanel + column;
            store(target, scale_sums(load_ints(target), rows.scales[begin + r], load(scales + column)));
        }
}

// values [rows][inputs] and scales [rows], where rows are the outputs, or [gate | up].
inline void pack_int8(Engine& engine, const Linear& linear, const std::int8_t* values, const float* scales) {
    const int offset = weight_offset(engine);
    auto* packed = static_cast<std::int8_t*>(const_cast<void*>(linear.packed));
    auto* packed_scales = const_cast<float*>(int8_scales(linear));
    engine.pool.run(num_panels(linear), [&](i64 panel, int) {
        std::int8_t* target = packed + panel * int8_panel_bytes(linear);
        std::memset(target, offset, int8_panel_bytes(linear));
        for (i64 column = 0; column < kPanel; ++column) {
            const i64 row = weight_row(linear, panel, column);
            packed_scales[panel * kPanel + column] = row < 0 ? 0.0f : scales[row];
            if (row < 0) continue;
            std::int8_t* strip = target + column / kStrip * kStrip * padded_inputs(linear) + column % kStrip * 4;
            for (i64 k = 0; k < linear.inputs; ++k)
                strip[k / 4 * 4 * kStrip + k % 4] = std::int8_t(values[row * linear.inputs + k] + offset);
        }
    });
}

// The weights of one output, for a linear that is not gated.
inline void read_int8_row(const Engine& engine, const Linear& linear, i64 output, float* out) {
    const int offset = weight_offset(engine);
    const auto* packed = static_cast<const std::int8_t*>(linear.packed);
    const std::int8_t* strip = packed + output / kStrip * kStrip * padded_inputs(linear) + output % kStrip * 4;
    const float scale = int8_scales(linear)[output];
    for (i64 k = 0; k < linear.inputs; ++k)
        out[k] = scale * float(std::int8_t(strip[k / 4 * 4 * kStrip + k % 4] - offset));
}

}  // namespace

// Linears with quantised weights.
//
// output = sum over groups and units, ascending, of scale of the group × (scale of the row's unit × float(sum of int8 ×
//          value)) - minimum × (scale of the row's unit × float(sum of int8))
//
// The same sum of the row's carries, without minima, is added to it. Without groups the scale of the output is multiplied
// last. Few rows are multiplied by weights where they lie; for more rows a part of a panel is unpacked once, to bytes and
// floats. Sums and the order of additions are the same.

#pragma once

#include "linears/many_rows.h"

namespace {

// The groups that values of some bits have, apart from bytes, which have any: of 16 or more inputs, with or without minima.
template <class C> constexpr bool kHasSixteens = C::kUnitBytes == unit_bytes(2) || C::kUnitBytes == unit_bytes(3) ||
                                                 C::kUnitBytes == unit_bytes(6);
template <class C> constexpr bool kCanHaveMinima = C::kUnitBytes == unit_bytes(2) || std::is_same_v<C, Code<4>> ||
                                                   C::kUnitBytes == unit_bytes(5);
template <class C> constexpr bool kCanLackMinima = C::kUnitBytes != unit_bytes(2);

// Calls body(Code<…>, Steps<…>) with what multiplies a packing.
template <class F> inline void with_steps(const Packing& packing, const F& body) {
    with_code(packing, [&](auto code) {
        using C = decltype(code);
        const auto with_groups = [&](auto sixteens) {
            constexpr bool bytes = std::is_same_v<C, Code<8>>;
            if constexpr (bytes || kCanHaveMinima<C>)
                if (packing.minima != kNoMinima) return body(code, Steps<C::kDot, sixteens, true, true>{});
            if constexpr (bytes || kCanLackMinima<C>) body(code, Steps<C::kDot, sixteens, false, true>{});
        };
        if constexpr (std::is_same_v<C, Code<8>>) {
            if (packing.group_size == 0) return body(code, Steps<C::kDot, false, false, false>{});
            if (packing.group_size == kSixteen) return with_groups(std::true_type{});
            return with_groups(std::false_type{});
        } else {
            with_groups(std::bool_constant<kHasSixteens<C>>{});
        }
    });
}

// c[end - begin][64] = quantised rows from begin to end × a panel of a part
[[gnu::noinline]]
inline void multiply_quantized_panel(const Engine& engine, const Linear& linear, i64 part, i64 panel, i64 begin, i64 end,
                                     float* c) {
    const WeightPart& weights = linear.parts[part];
    const QuantizedLayout layout(linear, weights.packing);
    const i64 panels = part_panels(linear, part), own = panel - (weights.end_panel - panels), rows = end - begin;
    const auto* packed = static_cast<const std::uint8_t*>(weights.packed) + own * layout.panel_bytes();
    const ProductRows x(engine.quantized, part, begin);
    with_steps(weights.packing, [&](auto code, auto steps) {
        if (rows >= kManyRows) return multiply_many_rows<decltype(code), decltype(steps)>(x, rows, layout, packed, c);
        const i64 tiles = (rows + kMaxByteRows - 1) / kMaxByteRows;
        for (i64 column = 0; column < kPanel; column += kStrip) {
            const std::uint8_t* strip = packed + column / kStrip * layout.strip_bytes;
            i64 tile = 0;
            for_row_tiles<kMaxByteRows>(rows, [&](i64 row, auto num_rows) {
                multiply_strip<num_rows, decltype(code), decltype(steps)>(
                    x.from(row), layout, strip, FarAhead(layout, strip, tile++, tiles), c + row * kPanel + column);
            });
        }
    });
    if (layout.blocks) return;
    const float* scales = output_scales(layout, weights.packed, panels) + own * kPanel;
    for (i64 r = 0; r < rows; ++r)
        for (i64 column = 0; column < kPanel; column += kStrip)
            store(c + r * kPanel + column, mul(load(c + r * kPanel + column), load(scales + column)));
}

}  // namespace

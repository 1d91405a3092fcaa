// Many rows × quantised weights, which are unpacked once. See quantized_linear.h.

#pragma once

#include "linears/few_rows.h"

namespace {

// Units of a panel that are unpacked together, strip by strip, so that memory is read as a stream; and units of these that
// all rows are multiplied by: 16 KB of bytes, which stay in L1 with some rows.
constexpr i64 kUnpackedUnits = 64, kInnerUnits = 8;

// Some units of a panel.
struct Unpacked {
    const std::uint8_t* values;  // [strip][units][quad][16][4], strips value_stride bytes apart
    i64 value_stride;
    const float* scales;  // [strip][kUnpackedUnits][groups][16], as minima; strips scale_stride numbers apart
    const float* minima;
    i64 scale_stride;

    Floats scale_of(int strip, i64 place) const { return load(scales + strip * scale_stride + place); }
    Unpacked from(i64 unit, i64 groups) const {
        const i64 place = unit * groups * kStrip;
        return {values + unit * 8 * 64, value_stride, scales + place, minima + place, scale_stride};
    }
    Unpacked from_strip(i64 strip) const {
        return {values + strip * value_stride, value_stride, scales + strip * scale_stride, minima + strip * scale_stride,
                scale_stride};
    }
};

// total[R][V] += a group of R rows × a group of V strips. place: of the group in w.scales
template <int R, int V, class S>
[[gnu::always_inline]] inline void add_unpacked_group(const UnitRows& unit, int half,
                                                      const Unpacked& w, const std::uint8_t* values, i64 place,
                                                      Floats (&total)[R][V]) {
    IntSums acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[r][v] = broadcast_ints(unit.starts[r] + half);
#pragma GCC unroll 1
    for (int n = 0; n < 8 / S::kGroups; ++n) {
        Ints numbers[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) numbers[v] = load_ints(values + v * w.value_stride + 64 * n);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                acc[r][v] = multiply_quads<S::kDot>(acc[r][v], unit.values[r] + 16 * half + 4 * n, numbers[v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const Floats row_scale = broadcast(*unit.scales[r]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
            add_products<S>((Ints)finish_quads<S::kDot>(acc[r][v]), row_scale, w.scale_of(v, place), total[r][v]);
    }
}

// c[R][16 V] += R rows × V strips, from first_unit on
template <int R, int V, class S>
void multiply_unpacked(const ProductRows& x, const Unpacked& w, i64 first_unit, i64 units, float* c) {
    Floats total[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) total[r][v] = load(c + r * kPanel + v * kStrip);
    for (i64 n = 0; n < units; ++n) {
        const i64 unit = first_unit + n;
#pragma GCC unroll 2
        for (int half = 0; half < S::kGroups; ++half) {
            const std::uint8_t* values = w.values + n * 8 * 64 + half * 4 * 64;
            const i64 place = (n * S::kGroups + half) * kStrip;
            add_unpacked_group<R, V, S>(UnitRows(x.rows.integers[0], x, S::kGroups, unit), half, w, values, place, total);
            if (!S::kHasMinima) continue;
            const float* negative = x.negative(S::kGroups, unit) + half;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Floats sum = broadcast(negative[r * x.units * S::kGroups]);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v)
                    total[r][v] = fmadd(load(w.minima + v * w.scale_stride + place), sum, total[r][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(c + r * kPanel + v * kStrip, total[r][v]);
}

template <class C>
void unpack_values(const QuantizedLayout& layout, const std::uint8_t* panel, i64 first_unit, i64 units, std::uint8_t* values) {
    for (i64 strip = 0; strip < kPanel / kStrip; ++strip, panel += layout.strip_bytes)
        for (i64 n = 0; n < units; ++n) {
            const std::uint8_t* packed = layout.unit_of(panel, first_unit + n);
            prefetch_unit<C>(packed);
#pragma GCC unroll 8
            for (int q = 0; q < 8; ++q) store_ints(values + ((strip * kUnpackedUnits + n) * 8 + q) * 64, C::quad(packed, q));
        }
}

template <class S>
void unpack_factors(const QuantizedLayout& layout, const std::uint8_t* panel, i64 first_unit, i64 units, float* scales,
                    float* minima) {
    const i64 group_units = S::kGroups == 1 ? layout.packing.group_size / kUnit : 1;
    for (i64 strip = 0; strip < kPanel / kStrip; ++strip, panel += layout.strip_bytes)
        for (i64 n = 0; n < units; ++n) {
            const i64 block = (first_unit + n) / layout.block_units, within = (first_unit + n) % layout.block_units;
            const std::uint8_t* header = panel + block * layout.block_bytes;
            for (int half = 0; half < S::kGroups; ++half) {
                const i64 group = S::kGroups == 2 ? 2 * within + half : within / group_units;
                const i64 place = ((strip * kUnpackedUnits + n) * S::kGroups + half) * kStrip;
                store(scales + place, layout.scales(header, group));
                if (S::kHasMinima) store(minima + place, layout.minima_of(header, group));
            }
        }
}

// c[rows][64] += rows × units of a panel
template <class S>
void multiply_units(const ProductRows& x, i64 rows, const Unpacked& w, i64 first_unit, i64 units, float* c) {
    for_row_tiles<kTileByteRows>(rows, [&](i64 row, auto num_rows) {
        const ProductRows own = x.from(row);
        for (i64 column = 0; column < kPanel; column += kStrip * kByteVectors)
            multiply_unpacked<decltype(num_rows)::value, kByteVectors, S>(own, w.from_strip(column / kStrip), first_unit, units,
                                                                          c + row * kPanel + column);
    });
}

// c[rows][64] += the rows' carries × 64 units of a panel
template <class S> void multiply_unpacked_carries(const ProductRows& x, i64 rows, const Unpacked& w, i64 word, float* c) {
    constexpr int strips = kPanel / kStrip;
    for (i64 r = 0; r < rows; ++r, c += kPanel) {
        const ProductRows own = x.from(r);
        Floats total[strips];
#pragma GCC unroll 4
        for (int v = 0; v < strips; ++v) total[v] = load(c + v * kStrip);
        for_wide_units(x.rows, own.first, word, [&](i64 unit) {
            const UnitRows carries(x.rows.integers[1], own, S::kGroups, unit);
            const i64 n = unit % kUnpackedUnits;
            const std::uint8_t quads = x.rows.quads[own.first * x.units + unit];
#pragma GCC unroll 2
            for (int half = 0; half < S::kGroups; ++half) {
                IntSums acc[strips];
#pragma GCC unroll 4
                for (int v = 0; v < strips; ++v) acc[v] = broadcast_ints(carries.starts[0] + half);
                for_each_bit(S::kGroups == 1 ? quads : quads & 15 << 4 * half, [&](i64 q) {
#pragma GCC unroll 4
                    for (int v = 0; v < strips; ++v)
                        acc[v] = multiply_quads<S::kDot>(acc[v], carries.values[0] + 4 * q,
                                                         load_ints(w.values + v * w.value_stride + (n * 8 + q) * 64));
                });
#pragma GCC unroll 4
                for (int v = 0; v < strips; ++v)
                    add_products<S>((Ints)finish_quads<S::kDot>(acc[v]), broadcast(*carries.scales[0]),
                                    w.scale_of(v, (n * S::kGroups + half) * kStrip), total[v]);
            }
        });
#pragma GCC unroll 4
        for (int v = 0; v < strips; ++v) store(c + v * kStrip, total[v]);
    }
}

constexpr i64 kManyRows = 40;  // from here on it takes less time to unpack a panel once

// c[rows][64] = many rows × a panel
template <class C, class S>
void multiply_many_rows(const ProductRows& x, i64 rows, const QuantizedLayout& layout, const std::uint8_t* panel, float* c) {
    constexpr bool in_place = std::is_same_v<C, Code<8>> && !S::kHasGroups;  // values are bytes already, without headers
    alignas(64) std::uint8_t values[in_place ? 1 : kPanel * kUnpackedUnits * kUnit];
    alignas(64) float scales[S::kHasGroups ? kPanel * kUnpackedUnits * S::kGroups : 1];
    alignas(64) float minima[S::kHasMinima ? kPanel * kUnpackedUnits * S::kGroups : 1];
    alignas(64) float carries[kTilePanelRows * kPanel];
    std::memset(c, 0, rows * kPanel * sizeof(float));
    std::memset(carries, 0, rows * kPanel * sizeof(float));
    for (i64 first = 0; first < layout.units; first += kUnpackedUnits) {
        const i64 units = std::min(kUnpackedUnits, layout.units - first);
        Unpacked weights{values, kUnpackedUnits * 8 * 64, scales, minima, kUnpackedUnits * S::kGroups * kStrip};
        if constexpr (!in_place) unpack_values<C>(layout, panel, first, units, values);
        else weights.values = layout.unit_of(panel, first), weights.value_stride = layout.strip_bytes;
        if constexpr (S::kHasGroups) unpack_factors<S>(layout, panel, first, units, scales, minima);
        for (i64 n = 0; n < units; n += kInnerUnits)
            multiply_units<S>(x, rows, weights.from(n, S::kGroups), first + n, std::min(kInnerUnits, units - n), c);
        multiply_unpacked_carries<S>(x, rows, weights, first / kUnpackedUnits, carries);
    }
    for (i64 n = 0; n < rows * kPanel; n += kStrip) store(c + n, add(load(c + n), load(carries + n)));
}

}  // namespace

// Linears with quantised weights.
//
// output = sum over groups and units, ascending, of scale of the group × (scale of the row's unit × float(sum of int8 ×
//          value)) - minimum × (scale of the row's unit × float(sum of int8))
//
// The same sum of the row's remainders, without minima, is added to it. Without groups the scale of the output is multiplied
// last. Few rows are multiplied by weights where they lie; for more rows a part of a panel is unpacked once, to bytes and
// floats. Sums and the order of additions are the same.

#pragma once

#include "linears/ggml_blocks.h"

namespace {

constexpr i64 kPrefetchBytes = 2048;
template <class C> inline void prefetch_unit(const std::uint8_t* values) {
#pragma GCC unroll 8
    for (i64 line = 0; line < C::kUnitBytes; line += 64) __builtin_prefetch(values + line + kPrefetchBytes);
}

// What a kernel is compiled for, beside the code.
template <Dot dot, bool sixteens, bool has_minima, bool has_groups> struct Steps {
    static constexpr Dot kDot = dot;
    static constexpr int kGroups = sixteens ? 2 : 1;  // of a unit
    static constexpr bool kHasMinima = has_minima, kHasGroups = has_groups;
};

// Some rows of a product, and what one part of the weights needs of them.
struct ProductRows {
    const QuantizedRows& rows;
    i64 part, first, bytes, units;

    ProductRows(const QuantizedRows& all, i64 which, i64 begin)
        : rows(all), part(which), first(begin), bytes(all.integers[0].inputs), units(bytes / kUnit) {}

    ProductRows from(i64 row) const { return {rows, part, first + row}; }
    const float* negative(i64 groups, i64 unit) const { return rows.negative[part].data() + (first * units + unit) * groups; }
};

// What a tile of several rows prefetches into the L2 cache, evenly over a strip's units, beside the next 2 KB of the stream:
// multiplying keeps the CPU from reading ahead. Of several tiles each prefetches a part of the next strip, as later ones read
// no memory.
struct FarAhead {
    const std::uint8_t *line, *end;
    i64 unit_bytes;

    FarAhead(const QuantizedLayout& layout, const std::uint8_t* strip, i64 tile, i64 tiles)
        : line(strip + (tiles == 1 ? 3 * kPrefetchBytes : layout.strip_bytes + layout.strip_bytes * tile / tiles)), end(line),
          unit_bytes(layout.strip_bytes / layout.units / tiles + 1) {}

    [[gnu::always_inline]] void prefetch() {
        for (end += unit_bytes; line < end; line += 64) __builtin_prefetch(line, 0, 2);
    }
};

// Which rows of a tile have remainders in each unit, as bits.
struct WideRows {
    std::uint8_t units[kMaxUnits];
    static_assert(kMaxByteRows <= 8);

    WideRows(const ProductRows& x, int count) {
        std::memset(units, 0, x.units);
        for (int r = 0; r < count; ++r) for_wide_units(x.rows, x.first + r, [&](i64 unit) { units[unit] |= 1 << r; });
    }
};

// Rows of an array, `stride` numbers apart. Few registers hold the addresses of six.
template <class T> struct Strided {
    const T *first, *third;
    i64 stride;

    Strided(const T* p, i64 n) : first(p), third(p + 3 * n), stride(n) {}
    [[gnu::always_inline]] const T* operator[](int r) const {
        return r < 3 ? first + r * stride : r < 6 ? third + (r - 3) * stride : third + 3 * stride + (r - 6) * stride;
    }
};

// The values of a unit, or its remainders.
struct UnitRows {
    Strided<std::int8_t> values;
    Strided<std::int32_t> starts;
    Strided<float> scales;

    UnitRows(const IntegerRows& rows, const ProductRows& x, i64 groups, i64 unit)
        : values(rows.row(x.first) + unit * kUnit, x.bytes),
          starts(rows.starts[x.part].data() + (x.first * x.units + unit) * groups, x.units * groups),
          scales(rows.scales.data() + x.first * x.units + unit, x.units) {}
};

// total[R] += a group of R rows × a group of a strip
template <int R, class C, class S, bool prefetches>
[[gnu::always_inline]] inline void add_group(const UnitRows& unit, int half, const std::uint8_t* values, Floats scale,
                                             Floats* total) {
    constexpr int chains = R == 1 ? 2 : 1;  // of additions: one would take as long as its latency
    IntSums acc[R][chains];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        acc[r][0] = broadcast_ints(unit.starts[r] + half);
        if (chains == 2) acc[r][1 % chains] = (IntSums)zero_ints();
    }
#pragma GCC unroll 8
    for (int n = 0; n < 8 / S::kGroups; ++n) {
        const int q = 8 / S::kGroups * half + n;
        if (prefetches && C::kUnitBytes > 64 * q) __builtin_prefetch(values + 64 * q + kPrefetchBytes);
        const Ints w = C::quad(values, q);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            acc[r][n % chains] = multiply_quads<S::kDot>(acc[r][n % chains], unit.values[r] + 4 * q, w);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        Ints whole = (Ints)finish_quads<S::kDot>(acc[r][0]);
        if (chains == 2) whole = add(whole, (Ints)finish_quads<S::kDot>(acc[r][1 % chains]));
        const Floats sum = to_floats(whole), row_scale = broadcast(*unit.scales[r]);
        total[r] = S::kHasGroups ? fmadd(mul(sum, row_scale), scale, total[r]) : fmadd(sum, row_scale, total[r]);
    }
}

// c[R][64] = R rows × a strip
template <int R, class C, class S>
[[gnu::noinline]]
void multiply_strip(const ProductRows& x, const QuantizedLayout& layout, const std::uint8_t* strip, FarAhead ahead, float* c) {
    const std::uint8_t* values = layout.unit_of(strip, 0);
    const i64 group_units = S::kHasGroups && S::kGroups == 1 ? layout.packing.group_size / kUnit : 1;
    const std::uint8_t* header = strip;
    const WideRows wide(x, R);
    Floats total[R], remainders[R], scale = broadcast(1.0f), minimum = broadcast(0.0f);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) total[r] = remainders[r] = broadcast(0.0f);
    for (i64 unit = 0, within = 0; unit < layout.units; ++unit, values += C::kUnitBytes) {
        if (within == 0) __builtin_prefetch(header + kPrefetchBytes);
        if (R > 2) ahead.prefetch();
#pragma GCC unroll 2
        for (int half = 0; half < S::kGroups; ++half) {
            if (S::kHasGroups && within % group_units == 0) {
                const i64 group = S::kGroups == 2 ? 2 * within + half : within / group_units;
                scale = layout.scales(header, group);
                if (S::kHasMinima) minimum = layout.minima_of(header, group);
            }
            add_group<R, C, S, true>(UnitRows(x.rows.integers[0], x, S::kGroups, unit), half, values, scale, total);
            for_each_bit(wide.units[unit], [&](i64 r) {
                add_group<1, C, S, false>(UnitRows(x.rows.integers[1], x.from(r), S::kGroups, unit), half, values, scale,
                                          remainders + r);
            });
            if (!S::kHasMinima) continue;
            const float* negative = x.negative(S::kGroups, unit) + half;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
                total[r] = fmadd(minimum, broadcast(negative[r * x.units * S::kGroups]), total[r]);
        }
        if (++within < layout.block_units) continue;
        within = 0;
        header += layout.block_bytes;
        values += layout.header;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(c + r * kPanel, add(total[r], remainders[r]));
}

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
        for (int v = 0; v < V; ++v) {
            const Floats sum = to_floats(finish_quads<S::kDot>(acc[r][v]));
            total[r][v] = S::kHasGroups ? fmadd(mul(sum, row_scale), load(w.scales + v * w.scale_stride + place), total[r][v])
                                        : fmadd(sum, row_scale, total[r][v]);
        }
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

// c[rows][64] += the rows' remainders × 64 units of a panel
template <class S> void multiply_unpacked_remainders(const ProductRows& x, i64 rows, const Unpacked& w, i64 word, float* c) {
    constexpr int strips = kPanel / kStrip;
    for (i64 r = 0; r < rows; ++r, c += kPanel) {
        const ProductRows own = x.from(r);
        Floats total[1][strips];
#pragma GCC unroll 4
        for (int v = 0; v < strips; ++v) total[0][v] = load(c + v * kStrip);
        for_wide_units(x.rows, own.first, word, [&](i64 unit) {
            const UnitRows fine(x.rows.integers[1], own, S::kGroups, unit);
            const i64 n = unit % kUnpackedUnits;
#pragma GCC unroll 2
            for (int half = 0; half < S::kGroups; ++half)
                add_unpacked_group<1, strips, S>(fine, half, w, w.values + n * 8 * 64 + half * 4 * 64,
                                                 (n * S::kGroups + half) * kStrip, total);
        });
#pragma GCC unroll 4
        for (int v = 0; v < strips; ++v) store(c + v * kStrip, total[0][v]);
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
    alignas(64) float remainders[kTilePanelRows * kPanel];
    std::memset(c, 0, rows * kPanel * sizeof(float));
    std::memset(remainders, 0, rows * kPanel * sizeof(float));
    for (i64 first = 0; first < layout.units; first += kUnpackedUnits) {
        const i64 units = std::min(kUnpackedUnits, layout.units - first);
        Unpacked weights{values, kUnpackedUnits * 8 * 64, scales, minima, kUnpackedUnits * S::kGroups * kStrip};
        if constexpr (!in_place) unpack_values<C>(layout, panel, first, units, values);
        else weights.values = layout.unit_of(panel, first), weights.value_stride = layout.strip_bytes;
        if constexpr (S::kHasGroups) unpack_factors<S>(layout, panel, first, units, scales, minima);
        for (i64 n = 0; n < units; n += kInnerUnits)
            multiply_units<S>(x, rows, weights.from(n, S::kGroups), first + n, std::min(kInnerUnits, units - n), c);
        multiply_unpacked_remainders<S>(x, rows, weights, first / kUnpackedUnits, remainders);
    }
    for (i64 n = 0; n < rows * kPanel; n += kStrip) store(c + n, add(load(c + n), load(remainders + n)));
}

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

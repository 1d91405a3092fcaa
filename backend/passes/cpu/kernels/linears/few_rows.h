// Few rows × quantised weights, which are multiplied where they lie. See quantized_linear.h.

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

// Which rows of a tile have carries in each unit, as bits.
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

// The values of a unit, or its carries.
struct UnitRows {
    Strided<std::int8_t> values;
    Strided<std::int32_t> starts;
    Strided<float> scales;

    UnitRows(const IntegerRows& rows, const ProductRows& x, i64 groups, i64 unit)
        : values(rows.row(x.first) + unit * kUnit, x.bytes),
          starts(rows.starts[x.part].data() + (x.first * x.units + unit) * groups, x.units * groups),
          scales(rows.scales.data() + x.first * x.units + unit, x.units) {}
};

template <class S> [[gnu::always_inline]] inline void add_products(Ints sums, Floats row_scale, Floats scale, Floats& total) {
    const Floats sum = to_floats(sums);
    total = S::kHasGroups ? fmadd(mul(sum, row_scale), scale, total) : fmadd(sum, row_scale, total);
}

// total[R] += a group of R rows × a group of a strip
template <int R, class C, class S>
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
        if (C::kUnitBytes > 64 * q) __builtin_prefetch(values + 64 * q + kPrefetchBytes);
        const Ints w = C::quad(values, q);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            acc[r][n % chains] = multiply_quads<S::kDot>(acc[r][n % chains], unit.values[r] + 4 * q, w);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        Ints whole = (Ints)finish_quads<S::kDot>(acc[r][0]);
        if (chains == 2) whole = add(whole, (Ints)finish_quads<S::kDot>(acc[r][1 % chains]));
        add_products<S>(whole, broadcast(*unit.scales[r]), scale, total[r]);
    }
}

// total += the carries of a row's group × a group of a strip
template <class C, class S>
[[gnu::always_inline]] inline void add_carries(const ProductRows& x, i64 unit, int half, const std::uint8_t* values,
                                               Floats scale, Floats* total) {
    const UnitRows carries(x.rows.integers[1], x, S::kGroups, unit);
    const std::uint8_t quads = x.rows.quads[x.first * x.units + unit];
    IntSums acc = broadcast_ints(carries.starts[0] + half);
#pragma GCC unroll 8
    for (int n = 0; n < 8 / S::kGroups; ++n) {
        const int q = 8 / S::kGroups * half + n;
        if (quads >> q & 1) acc = multiply_quads<S::kDot>(acc, carries.values[0] + 4 * q, C::quad(values, q));
    }
    add_products<S>((Ints)finish_quads<S::kDot>(acc), broadcast(*carries.scales[0]), scale, *total);
}

// c[R][64] = R rows × a strip
template <int R, class C, class S>
[[gnu::noinline]]
void multiply_strip(const ProductRows& x, const QuantizedLayout& layout, const std::uint8_t* strip, FarAhead ahead, float* c) {
    const std::uint8_t* values = layout.unit_of(strip, 0);
    const i64 group_units = S::kHasGroups && S::kGroups == 1 ? layout.packing.group_size / kUnit : 1;
    const std::uint8_t* header = strip;
    const WideRows wide(x, R);
    Floats total[R], carries[R], scale = broadcast(1.0f), minimum = broadcast(0.0f);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) total[r] = carries[r] = broadcast(0.0f);
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
            add_group<R, C, S>(UnitRows(x.rows.integers[0], x, S::kGroups, unit), half, values, scale, total);
            for_each_bit(wide.units[unit],
                         [&](i64 r) { add_carries<C, S>(x.from(r), unit, half, values, scale, carries + r); });
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
    for (int r = 0; r < R; ++r) store(c + r * kPanel, add(total[r], carries[r]));
}

}  // namespace

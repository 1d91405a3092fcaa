// Activations in int8, with one scale for each unit of 32 inputs.
//
// A scale is the unit's largest magnitude / 127. Where that is large beside the row's other units, what rounding leaves is
// rounded to int8 again: a few inputs of real models are far larger than the rest, and with them all of their unit would
// be coarse. A linear that scales whole rows has one scale for all units and no remainders.
//
// Sums of integers are exact, so a row's result is the same bits in any batch and with any instructions. A unit with a
// number that is not finite has the scale NaN, and so have all outputs of its row.

#pragma once

#include "linears/linear.h"

namespace {

constexpr i64 kStrip = 16;    // outputs of a strip: a vector
constexpr i64 kUnit = 32;     // inputs that are multiplied between two additions of floats
constexpr i64 kMaxUnits = (1 << 17) / kUnit;  // as MAX_QUANTIZED_INPUTS
constexpr i64 kSixteen = 16;  // inputs of the smallest groups

inline i64 padded_inputs(const Linear& linear) { return (linear.inputs + 63) / 64 * 64; }

constexpr float kWide = 1.5f;        // a unit is wide from this multiple of the root mean square of the units' largest on
constexpr float kRemainder = 254.0f;  // a scale / this is that of the remainders, which are up to half a step

template <class T> float largest_of(const T* x, i64 count) {
    Ints top_bits = zero_ints();
    for (i64 k = 0; k < count; k += 16) top_bits = max_bits(top_bits, load(x + k, count - k));
    return largest_magnitude(top_bits);
}

// x[0 … count) → 32 values, of which zeros are the last, and remainders unless they are null.
template <class T> void round_unit(const T* x, i64 count, float top, std::int8_t* values, std::int8_t* remainders) {
    if (!(top >= 1e-30f)) {
        std::memset(values, 0, kUnit);
        return;
    }
    const Floats factor = broadcast(127.0f / top);
    for (i64 k = 0; k < kUnit; k += 16) {
        const Floats steps = k < count ? mul(load(x + k, count - k), factor) : broadcast(0.0f);
        store_bytes(values + k, steps);
        if (remainders) store_bytes(remainders + k, mul(sub(steps, round_to_even(steps)), broadcast(kRemainder)));
    }
}

inline i64 wide_words(const QuantizedRows& rows) { return (rows.integers[0].inputs / kUnit + 63) / 64; }

inline void sum_sixteens(IntegerRows& rows, i64 r, i64 unit) {
    const std::int8_t* values = rows.row(r) + unit * kUnit;
    std::int16_t* sums = rows.sixteens.data() + (r * rows.inputs + unit * kUnit) / kSixteen * 2;
    store_negative_sums(values, sums);
    store_negative_sums(values + kSixteen, sums + 2);
}

template <class T> void quantize_row(const T* x, i64 inputs, bool whole_rows, QuantizedRows& out, i64 r) {
    IntegerRows &coarse = out.integers[0], &fine = out.integers[1];
    const i64 units = coarse.inputs / kUnit;
    float* tops = coarse.scales.data() + r * units;
    std::uint64_t* wide_bits = out.wide.data() + r * wide_words(out);
    std::fill_n(wide_bits, wide_words(out), 0);
    float squares = 0.0f;
    for (i64 u = 0; u < units; ++u) {
        tops[u] = largest_of(x + u * kUnit, std::clamp<i64>(inputs - u * kUnit, 0, kUnit));
        squares += tops[u] * tops[u];
    }
    if (whole_rows) std::fill_n(tops, units, largest_of(x, inputs));
    const float mean = squares / float((inputs + kUnit - 1) / kUnit);
    const float wide = whole_rows ? std::numeric_limits<float>::infinity() : kWide * std::sqrt(mean);
    for (i64 u = 0; u < units; ++u) {
        const i64 k = u * kUnit;
        const bool is_wide = tops[u] > wide;
        round_unit(x + k, inputs - k, tops[u], coarse.row(r) + k, is_wide ? fine.row(r) + k : nullptr);
        tops[u] /= 127.0f;
        sum_sixteens(coarse, r, u);
        if (!is_wide) continue;
        fine.scales[r * units + u] = tops[u] / kRemainder;
        sum_sixteens(fine, r, u);
        wide_bits[u / 64] |= std::uint64_t(1) << u % 64;
    }
}

template <class F> [[gnu::always_inline]] inline void for_each_bit(std::uint64_t bits, const F& body) {
    for (; bits; bits &= bits - 1) body(i64(__builtin_ctzll(bits)));
}

// Calls body(unit) for the units of a row that have remainders, among the 64 of a word, or among all.
template <class F>
[[gnu::always_inline]] inline void for_wide_units(const QuantizedRows& rows, i64 r, i64 word, const F& body) {
    for_each_bit(rows.wide[r * wide_words(rows) + word], [&](i64 bit) { body(word * 64 + bit); });
}
template <class F> inline void for_wide_units(const QuantizedRows& rows, i64 r, const F& body) {
    for (i64 word = 0; word < wide_words(rows); ++word) for_wide_units(rows, r, word, body);
}

template <class T> void grow(std::vector<T>& array, i64 size) {
    if (i64(array.size()) < size) array.resize(size);
}

// Quantises x [rows][inputs] into engine.quantized.
template <class T> void quantize_rows(Engine& engine, const T* x, i64 rows, const Linear& linear) {
    QuantizedRows& out = engine.quantized;
    for (IntegerRows& each : out.integers) {
        each.inputs = padded_inputs(linear);
        grow(each.memory, rows * each.inputs / 64);
        grow(each.scales, rows * each.inputs / kUnit);
        grow(each.sixteens, rows * each.inputs / kSixteen * 2);
    }
    grow(out.wide, rows * wide_words(out));
    // Few rows are quantised by the calling thread: waking the others would take longer.
    engine.split(rows, std::max<i64>(1, 32768 / linear.inputs), [&](i64 first, i64 last, int) {
        for (i64 r = first; r < last; ++r)
            quantize_row(x + r * linear.inputs, linear.inputs, linear.scales_whole_rows, out, r);
    });
}

// What a part's sums need. sixteens: of a group; zero: what its stored values exceed their meaning by.
struct SumNeeds {
    i64 part, sixteens;
    int zero;
    bool split;  // as kSplitSums
    bool minima;
};

// Fills starts and negative sums of n rows.
inline void prepare_sums(Engine& engine, i64 num_rows, const SumNeeds& needs) {
    QuantizedRows& rows = engine.quantized;
    const i64 units = rows.integers[0].inputs / kUnit, unit_groups = 2 / needs.sixteens;
    auto& negative = rows.negative[needs.part];
    for (IntegerRows& each : rows.integers) grow(each.starts[needs.part], num_rows * units * unit_groups);
    if (needs.minima) grow(negative, num_rows * units * unit_groups);
    // Returns the negative sum of a group's integers.
    const auto start = [&](IntegerRows& each, i64 group) {
        const std::int16_t* own = each.sixteens.data() + group * needs.sixteens * 2;
        const int even = needs.sixteens == 1 ? own[0] : own[0] + own[2], odd = needs.sixteens == 1 ? own[1] : own[1] + own[3];
        each.starts[needs.part][group] =
            needs.split ? std::int32_t((std::uint32_t(needs.zero * odd) << 16) | std::uint16_t(needs.zero * even))
                        : needs.zero * (even + odd);
        return each.scales[group / unit_groups] * float(even + odd);
    };
    engine.split(num_rows, std::max<i64>(1, 65536 / rows.integers[0].inputs), [&](i64 first, i64 last, int) {
        for (i64 group = first * units * unit_groups; group < last * units * unit_groups; ++group) {
            const float sum = start(rows.integers[0], group);
            if (needs.minima) negative[group] = sum;
        }
        for (i64 r = first; r < last; ++r)
            for_wide_units(rows, r, [&](i64 unit) {
                for (i64 group = (r * units + unit) * unit_groups; group < (r * units + unit + 1) * unit_groups; ++group) {
                    const float sum = start(rows.integers[1], group);
                    if (needs.minima) negative[group] += sum;
                }
            });
    });
}

}  // namespace

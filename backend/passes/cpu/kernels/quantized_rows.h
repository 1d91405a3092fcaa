// Activations in int8, with one scale for each unit of 32 inputs.
//
// A scale is the unit's largest magnitude / 127. Where that is large beside the row's other units, what rounding leaves is
// rounded to int8 again: a few inputs of real models are far larger than the rest, and with them all of their unit would
// be coarse. A linear that scales whole rows has one scale for all units and no remainders.
//
// Sums of integers are exact, so a row's result is the same bits in any batch and with any instructions. A unit with a
// number that is not finite has the scale NaN, and so have all outputs of its row.

#pragma once

#include "linear.h"

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

inline void sum_sixteens(IntegerRows& rows, i64 r) {
    std::int16_t* sums = rows.sixteens.data() + r * rows.inputs / kSixteen * 2;
    for (i64 k = 0; k < rows.inputs; k += kSixteen, sums += 2) store_negative_sums(rows.row(r) + k, sums);
}

template <class T> void quantize_row(const T* x, i64 inputs, bool whole_rows, QuantizedRows& out, i64 r) {
    IntegerRows &coarse = out.integers[0], &fine = out.integers[1];
    const i64 units = coarse.inputs / kUnit;
    float* tops = coarse.scales.data() + r * units;
    float* fine_scales = fine.scales.data() + r * units;
    std::uint8_t* is_wide = out.is_wide.data() + r * units;
    float squares = 0.0f;
    for (i64 u = 0; u < units; ++u) {
        tops[u] = largest_of(x + u * kUnit, std::clamp<i64>(inputs - u * kUnit, 0, kUnit));
        squares += tops[u] * tops[u];
    }
    if (whole_rows) std::fill_n(tops, units, largest_of(x, inputs));
    const float mean = squares / float((inputs + kUnit - 1) / kUnit);
    const float wide = whole_rows ? std::numeric_limits<float>::infinity() : kWide * std::sqrt(mean);
    bool has_wide = false;
    for (i64 u = 0; u < units; ++u) {
        const i64 k = u * kUnit;
        std::int8_t* remainders = fine.row(r) + k;
        is_wide[u] = tops[u] > wide;
        has_wide |= is_wide[u];
        if (!is_wide[u]) std::memset(remainders, 0, kUnit);
        round_unit(x + k, inputs - k, tops[u], coarse.row(r) + k, is_wide[u] ? remainders : nullptr);
        tops[u] /= 127.0f;
        fine_scales[u] = is_wide[u] ? tops[u] / kRemainder : 0.0f;
    }
    sum_sixteens(coarse, r);
    if (has_wide) sum_sixteens(fine, r);
    else std::fill_n(fine.sixteens.data() + r * units * 4, units * 4, std::int16_t(0));
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
    grow(out.is_wide, rows * out.integers[0].inputs / kUnit);
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
    const i64 groups = rows.integers[0].inputs / (kSixteen * needs.sixteens), last_two = 2 * (needs.sixteens - 1);
    auto& negative = rows.negative[needs.part];
    for (IntegerRows& each : rows.integers) grow(each.starts[needs.part], num_rows * groups);
    if (needs.minima) grow(negative, num_rows * groups);
    engine.split(num_rows, std::max<i64>(1, 65536 / rows.integers[0].inputs), [&](i64 first, i64 last, int) {
        for (IntegerRows& each : rows.integers) {
            const std::int16_t* own = each.sixteens.data() + first * groups * needs.sixteens * 2;
            std::int32_t* starts = each.starts[needs.part].data();
            for (i64 n = first * groups; n < last * groups; ++n, own += 2 * needs.sixteens) {
                const int even = needs.sixteens == 1 ? own[0] : own[0] + own[last_two];
                const int odd = needs.sixteens == 1 ? own[1] : own[1] + own[last_two + 1];
                starts[n] = needs.split ? std::int32_t((std::uint32_t(needs.zero * odd) << 16) | std::uint16_t(needs.zero * even))
                                        : needs.zero * (even + odd);
                if (!needs.minima) continue;
                const float sum = each.scales[n * needs.sixteens / 2] * float(even + odd);
                negative[n] = &each == rows.integers ? sum : negative[n] + sum;
            }
        }
    });
}

}  // namespace

// Activations in int8, and how linears with quantised weights run.
//
//   packed weight  [panel of 64 outputs][strip of 16 outputs]; zeros fill the last panel
//
// A row's scale is its largest magnitude / 127. Sums of integers are exact, so a row's result is the same bits in any
// batch and with any instructions. A row with a number that is not finite has the scale NaN, and so all its outputs.

#pragma once

#include "linear.h"

namespace {

constexpr i64 kStrip = 16;     // outputs of a strip: a vector
constexpr i64 kSumGroup = 32;  // inputs of a group sum

inline i64 padded_inputs(const Linear& linear) { return (linear.inputs + 63) / 64 * 64; }

template <class T> void quantize_row(const T* x, i64 inputs, QuantizedRows& out, i64 r) {
    Ints top_bits = zero_ints();
    for (i64 k = 0; k < inputs; k += 16) top_bits = max_bits(top_bits, load(x + k, inputs - k));
    const float top = largest_magnitude(top_bits);
    std::int8_t* values = out.row(r);
    out.scales[r] = top / 127.0f;
    if (top >= 1e-30f) {
        const Floats factor = broadcast(127.0f / top);
        for (i64 k = 0; k < inputs; k += 16) store_bytes(values + k, mul(load(x + k, inputs - k), factor));
    }
    const i64 end = top >= 1e-30f ? (inputs + 15) / 16 * 16 : 0;
    std::memset(values + end, 0, out.inputs - end);
}

inline void sum_row(QuantizedRows& rows, i64 r) {
    const i64 groups = rows.inputs / kSumGroup;
    std::int16_t* sums = rows.group_sums.data() + r * groups * 2;
    std::int32_t sum = 0;
    for (i64 g = 0; g < groups; ++g) {
        store_negative_sums(rows.row(r) + g * kSumGroup, sums + 2 * g);
        sum -= sums[2 * g] + sums[2 * g + 1];
    }
    rows.sums[r] = sum;
}

// Quantises x [rows][inputs] into engine.quantized, and the rows' sums if the weights need them.
template <class T> void quantize_rows(Engine& engine, const T* x, i64 rows, i64 inputs, bool needs_sums) {
    QuantizedRows& out = engine.quantized;
    out.inputs = (inputs + 63) / 64 * 64;
    const auto grow = [](auto& array, i64 size) {
        if (i64(array.size()) < size) array.resize(size);
    };
    grow(out.memory, rows * out.inputs / 64);
    grow(out.scales, rows);
    grow(out.sums, rows);
    grow(out.group_sums, rows * out.inputs / kSumGroup * 2);
    // Few rows are quantised by the calling thread: waking the others would take longer.
    engine.split(rows, std::max<i64>(1, 32768 / inputs), [&](i64 first, i64 last, int) {
        for (i64 r = first; r < last; ++r) {
            quantize_row(x + r * inputs, inputs, out, r);
            if (needs_sums) sum_row(out, r);
        }
    });
}

// Calls body(row, Count<n>) for tiles of n ≤ kMaxByteRows rows.
template <class F> inline void for_byte_rows(i64 rows, const F& body) { for_row_tiles<kMaxByteRows>(rows, body); }

}  // namespace

// Products with weights of any form.

#pragma once

#include "linears/quantized_linear.h"

namespace {

inline bool is_quantized(const Linear& linear) { return linear.parts[0].packing.bits != 0; }

inline i64 part_of(const Linear& linear, i64 panel) {
    i64 part = 0;
    while (panel >= linear.parts[part].end_panel) ++part;
    return part;
}

// Rows that are multiplied by a panel at once, at most.
template <class T> i64 max_panel_rows(const Engine& engine, const Linear& linear) {
    return is_quantized(linear) || uses_tiles<T>(engine) ? kTilePanelRows : kPanelRows;
}

// Call it before products with x [rows][inputs]: quantised weights multiply engine.quantized.
template <class T> void prepare_rows(Engine& engine, const Linear& linear, i64 rows, const T* x) {
    if (!is_quantized(linear)) return;
    quantize_rows(engine, x, rows, linear);
    for (i64 part = 0; part < linear.num_parts; ++part) {
        const Packing& packing = linear.parts[part].packing;
        prepare_sums(engine, rows, {part, packing.group_size == kSixteen ? 1 : 2, zero_of(packing),
                                    kSplitSums && is_small(packing), packing.minima != kNoMinima});
    }
}

// c[end - begin][64] = the rows from begin to end of the prepared x × a panel
template <class T>
void multiply_panel(const Engine& engine, const Linear& linear, i64 panel, i64 begin, i64 end, const T* x, float* c) {
    if (is_quantized(linear))
        return multiply_quantized_panel(engine, linear, part_of(linear, panel), panel, begin, end, c);
    multiply_float_panel(engine, linear, panel, end - begin, x + begin * linear.inputs, c);
}

template <class T> void run_linear(Engine& engine, const Linear& linear, i64 output, const T* x, void* out) {
    prepare_rows(engine, linear, engine.step.rows(), x);
    run_down(engine, linear, x);
    for_each_panel<T>(
        engine, linear, output, max_panel_rows<T>(engine, linear), out,
        [&](i64 panel, i64 begin, i64 end, float* c) { multiply_panel(engine, linear, panel, begin, end, x, c); });
}

}  // namespace

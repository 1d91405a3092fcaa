// Products with weights of any form.

#pragma once

#include "grouped_linear.h"

namespace {

// Rows that are multiplied by a panel at once, at most.
template <class T> i64 max_panel_rows(const Engine& engine, const Linear& linear) {
    const bool tiles = linear.form == kInt8Weight ? kHasTiles && engine.shape.uses_tiles
                                                  : linear.form == kFloatWeight && uses_tiles<T>(engine);
    return tiles ? kTilePanelRows : kPanelRows;
}

// Call it before products with x [rows][inputs]: quantised weights multiply engine.quantized.
template <class T> void prepare_rows(Engine& engine, const Linear& linear, i64 rows, const T* x) {
    switch (linear.form) {
        case kFloatWeight: return;
        case kInt8Weight: return quantize_rows(engine, x, rows, linear.inputs, weight_offset(engine) != 0);
        case kInt4Weight: return quantize_rows(engine, x, rows, linear.inputs, true);
        default:
            quantize_rows(engine, x, rows, linear.inputs, false);
            sum_sixteens(engine, rows, linear.inputs);
    }
}

// c[end - begin][64] = the rows from begin to end of the prepared x × a panel
template <class T>
void multiply_panel(const Engine& engine, const Linear& linear, i64 panel, i64 begin, i64 end, const T* x, float* c) {
    switch (linear.form) {
        case kInt8Weight:
            if (kHasTiles && engine.shape.uses_tiles)
                return multiply_int8_panel_on_tiles(engine, linear, panel, begin, end, c);
            return multiply_int8_panel(engine, linear, panel, begin, end, c);
        case kInt4Weight: return multiply_int4_panel(engine, linear, panel, begin, end, c);
        case kGrouped4Weight: return multiply_grouped_panel<4>(engine, linear, panel, begin, end, c);
        case kGrouped8Weight: return multiply_grouped_panel<8>(engine, linear, panel, begin, end, c);
        default: return multiply_float_panel(engine, linear, panel, end - begin, x + begin * linear.inputs, c);
    }
}

template <class T> void run_linear(Engine& engine, const Linear& linear, i64 output, const T* x, void* out) {
    prepare_rows(engine, linear, engine.step.rows(), x);
    run_down(engine, linear, x);
    for_each_panel<T>(
        engine, linear, output, max_panel_rows<T>(engine, linear), out,
        [&](i64 panel, i64 begin, i64 end, float* c) { multiply_panel(engine, linear, panel, begin, end, x, c); });
}

}  // namespace

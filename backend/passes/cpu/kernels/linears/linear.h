// Linears with float weights, and what all linears do with their results.
//
//   packed weight  [panel of 64 outputs][inputs / lane][64][lane]; zeros fill the last panel

#pragma once

#include "linears/lora.h"

namespace {

inline i64 panel_width(const Linear& linear) { return linear.gated ? kPanel / 2 : kPanel; }
inline i64 num_panels(const Linear& linear) { return (linear.outputs + panel_width(linear) - 1) / panel_width(linear); }

// The row of the unpacked weight that a panel's column has; -1 for those that fill the last panel.
inline i64 weight_row(const Linear& linear, i64 panel, i64 column) {
    const i64 width = panel_width(linear), output = panel * width + column % width;
    return output < linear.outputs ? output + column / width * linear.outputs : -1;
}

// How much of a panel and of the rows are multiplied together: on vectors, steps that fit in the L2 cache with their
// rows; on tiles, for more rows than a tile has, steps that fit in L1.
constexpr int kPanelSteps = 1024;
constexpr int kTilePanelRows = 256, kTilePanelSteps = 128;

template <class T> bool uses_tiles(const Engine& engine) {
    return kHasTiles && std::is_same_v<T, bf16> && engine.shape.uses_tiles;
}

// c[rows][columns] (+)= a[rows][steps × lane] × b[steps][columns × lane]; lda and ldb in elements, ldc in floats.
template <class T>
void product(const Engine& engine, i64 rows, i64 columns, const T* a, i64 lda, const T* b, i64 ldb, i64 steps, float* c,
             i64 ldc, bool add) {
    if constexpr (kHasTiles && std::is_same_v<T, bf16>)
        if (uses_tiles<T>(engine)) return tile_product(rows, columns, a, lda, b, ldb, steps, c, ldc, add);
    vector_product<Source::kMemory>(rows, columns, a, lda, b, ldb, steps, c, ldc, add);
}

// kGated…: activation(gate) × up. kGatedClamped: clamped_mul. kGelu… to kSilu: of a linear that is not gated.
enum Output : i64 {
    kStore = 0, kStoreFloat = 1, kAdd = 2, kGatedSilu = 3, kGatedGelu = 4, kGelu = 5, kGatedClamped = 6,
    kGatedGeluErf = 7, kGeluErf = 8, kRelu = 9, kSilu = 10
};

inline Floats gated(const Shape& shape, i64 output, Floats gate, Floats up) {
    switch (output) {
        case kGatedGelu: return gelu_mul(gate, up);
        case kGatedGeluErf: return gelu_erf_mul(gate, up);
        case kGatedClamped: return clamped_mul(gate, up, broadcast(shape.gate_alpha), broadcast(shape.gate_limit));
        default: return silu_mul(gate, up);
    }
}

template <class T>
void write_outputs(const Engine& engine, const Linear& linear, i64 output, i64 panel, i64 rows, const float* c, void* out,
                   i64 first_row) {
    const Shape& shape = engine.shape;
    const i64 width = panel_width(linear);
    const i64 first = panel * width;
    for (i64 r = 0; r < rows; ++r) {
        const float* row = c + r * kPanel;
        const i64 base = (first_row + r) * linear.outputs;
        const Adapter* adapter = adapter_of(engine, linear, first_row + r);
        const float* ranks = adapter ? ranks_of(engine, linear, first_row + r) : nullptr;
        for (i64 v = 0; v < width && first + v < linear.outputs; v += 16) {
            const i64 column = first + v, count = linear.outputs - column;
            Floats x = load(row + v);
            if (linear.bias) x = add(x, load(linear.bias + column, count));
            x = mul(x, broadcast(linear.scale));
            if (adapter) x = add(x, lora_output<T>(*adapter, ranks, column));
            switch (output) {
                case kGatedSilu:
                case kGatedGelu:
                case kGatedGeluErf:
                case kGatedClamped: {
                    Floats up = load(row + width + v);
                    if (linear.bias) up = add(up, load(linear.bias + linear.outputs + column, count));
                    if (adapter) up = add(up, lora_output<T>(*adapter, ranks, linear.outputs + column));
                    store(static_cast<T*>(out) + base + column, gated(shape, output, x, up), count);
                    break;
                }
                case kGelu: store(static_cast<T*>(out) + base + column, gelu_mul(x, broadcast(1.0f)), count); break;
                case kGeluErf:
                    store(static_cast<T*>(out) + base + column, gelu_erf_mul(x, broadcast(1.0f)), count);
                    break;
                case kRelu: store(static_cast<T*>(out) + base + column, max(broadcast(0.0f), x), count); break;
                case kSilu: store(static_cast<T*>(out) + base + column, silu_mul(x, broadcast(1.0f)), count); break;
                case kAdd: {
                    float* target = static_cast<float*>(out) + base + column;
                    store(target, add(load(target, count), x), count);
                    break;
                }
                case kStoreFloat: store(static_cast<float*>(out) + base + column, x, count); break;
                default: store(static_cast<T*>(out) + base + column, x, count);
            }
        }
    }
}

// Calls body(panel, begin, end, c) in parallel, for panels and blocks of at most panel_rows rows, and writes c, the
// products [end - begin][64].
template <class T, class F>
void for_each_panel(Engine& engine, const Linear& linear, i64 output, i64 panel_rows, void* out, const F& body) {
    const i64 rows = engine.step.rows(), panels = num_panels(linear);
    const i64 enough = (engine.pool.num_threads() * 4 + panels - 1) / panels;  // row blocks that keep every thread busy
    const i64 row_blocks =
        std::max((rows + panel_rows - 1) / panel_rows, std::clamp<i64>(enough, 1, (rows + 47) / 48));
    engine.pool.run_ranges(panels * row_blocks, [&](i64 chunk) {
        const i64 panel = chunk / row_blocks, row_block = chunk % row_blocks;
        const i64 begin = rows * row_block / row_blocks, end = rows * (row_block + 1) / row_blocks;
        const TileScope scope;
        alignas(64) float c[std::max(kPanelRows, kTilePanelRows) * kPanel];
        body(panel, begin, end, c);
        write_outputs<T>(engine, linear, output, panel, end - begin, c, out, begin);
    });
}

// c[rows][64] = x[rows][inputs] × a panel of float weights
template <class T>
void multiply_float_panel(const Engine& engine, const Linear& linear, i64 panel, i64 rows, const T* x, float* c) {
    const i64 steps = linear.inputs / kLane<T>;
    const i64 panel_steps = uses_tiles<T>(engine) && rows > kTileRows ? kTilePanelSteps : kPanelSteps;
    const T* weights = static_cast<const T*>(linear.parts[0].packed) + panel * linear.inputs * kPanel;
    if constexpr (kWideRows > 0 && std::is_same_v<T, bf16>)
        if (rows > kMaxRows) return widened_product(rows, x, linear.inputs, weights, steps, c);
    for (i64 step = 0; step < steps; step += panel_steps)
        product(engine, rows, kPanel, x + step * kLane<T>, linear.inputs, weights + step * kPanel * kLane<T>,
                kPanel * kLane<T>, std::min<i64>(panel_steps, steps - step), c, kPanel, step > 0);
}

// weight [rows][inputs], where rows are the outputs, or [gate | up].
template <class T> void pack_weight(Engine& engine, const Linear& linear, const T* weight) {
    T* packed = static_cast<T*>(const_cast<void*>(linear.parts[0].packed));
    engine.pool.run(num_panels(linear), [&](i64 panel, int) {
        T* target = packed + panel * linear.inputs * kPanel;
        for (i64 column = 0; column < kPanel; ++column) {
            const i64 row = weight_row(linear, panel, column);
            for (i64 k = 0; k < linear.inputs; ++k)
                target[(k / kLane<T> * kPanel + column) * kLane<T> + k % kLane<T>] =
                    row < 0 ? T(0) : weight[row * linear.inputs + k];
        }
    });
}

}  // namespace

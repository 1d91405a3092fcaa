// The micro-kernel of all float matrix products, and the linear layers.
//
// Each output is summed over k by itself and in a fixed order, so a row's result is the same bits in any batch.
//
//   packed weight  [panel of 64 outputs][inputs / lane][64][lane]; zeros fill the last panel

#pragma once

#include "engine.h"

namespace {

constexpr int kPanel = 64;         // outputs of a packed panel: 4 vectors
constexpr int kPanelRows = 96;     // rows that are multiplied with a panel together
constexpr int kPanelSteps = 1024;  // steps of a panel that fit in the L2 cache

template <int N> using Count = std::integral_constant<int, N>;

// Calls body(Count<n>), n from 1 to Max.
template <int Max, class F> inline void with_count(i64 n, const F& body) {
    if constexpr (Max > 1)
        if (n < Max) return with_count<Max - 1>(n, body);
    body(Count<Max>{});
}

// Calls body(first_row, Count<n>) for tiles of n ≤ kMaxRows rows, of sizes as equal as possible.
template <class F> inline void for_row_tiles(i64 rows, const F& body) {
    const i64 tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (i64 tile = 0, row = 0; tile < tiles; ++tile) {
        const i64 count = (rows - row + tiles - tile - 1) / (tiles - tile);
        with_count<kMaxRows>(count, [&](auto exact) { body(row, exact); });
        row += count;
    }
}

// Calls body(first_column, Count<v>) for tiles of 16 v columns, first the widest that R rows allow. columns: a multiple
// of 16.
template <int R, int V = max_vectors(R), class F> inline void for_column_tiles(i64 first, i64 columns, const F& body) {
    for (; first + 16 * V <= columns; first += 16 * V) body(first, Count<V>{});
    if constexpr (V > 1)
        if (first < columns) for_column_tiles<R, V / 2>(first, columns, body);
}

// c[R][16 V] (+)= a[R][steps × lane] × b[steps][16 V × lane]; lda and ldb in elements, ldc in floats.
template <int R, int V, class T>
void tile_product(const T* a, i64 lda, const T* b, i64 ldb, i64 steps, float* c, i64 ldc, bool add) {
    Floats acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] = add ? load(c + r * ldc + 16 * v) : broadcast(0.0f);
    for (i64 k = 0; k < steps; ++k) {
        Floats w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) w[v] = load(reinterpret_cast<const float*>(b + k * ldb) + 16 * v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(acc[r][v], a + r * lda + k * kLane<T>, w[v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(c + r * ldc + 16 * v, acc[r][v]);
}

// The same for any number of rows and any multiple of 16 columns.
template <class T>
void product(i64 rows, i64 columns, const T* a, i64 lda, const T* b, i64 ldb, i64 steps, float* c, i64 ldc, bool add) {
    for_row_tiles(rows, [&](i64 row, auto num_rows) {
        constexpr int R = decltype(num_rows)::value;
        for_column_tiles<R>(0, columns, [&](i64 column, auto num_vectors) {
            constexpr int V = decltype(num_vectors)::value;
            tile_product<R, V>(a + row * lda, lda, b + column * kLane<T>, ldb, steps, c + row * ldc + column, ldc, add);
        });
    });
}

enum Output : i64 { kStore = 0, kStoreFloat = 1, kAdd = 2, kGated = 3 };

template <class T>
void write_outputs(const Linear& linear, i64 output, i64 panel, i64 rows, const float* c, void* out, i64 first_row) {
    const i64 width = output == kGated ? kPanel / 2 : kPanel;
    const i64 first = panel * width;
    for (i64 r = 0; r < rows; ++r) {
        const float* row = c + r * kPanel;
        const i64 base = (first_row + r) * linear.outputs;
        for (i64 v = 0; v < width && first + v < linear.outputs; v += 16) {
            const i64 column = first + v, count = linear.outputs - column;
            Floats x = load(row + v);
            if (linear.bias) x = add(x, load(linear.bias + column, count));
            switch (output) {
                case kGated: {
                    Floats up = load(row + width + v);
                    if (linear.bias) up = add(up, load(linear.bias + linear.outputs + column, count));
                    store(static_cast<T*>(out) + base + column, silu_mul(x, up), count);
                    break;
                }
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

template <class T> void run_linear(Engine& engine, const Linear& linear, i64 output, const T* x, i64 rows, void* out) {
    const i64 width = output == kGated ? kPanel / 2 : kPanel;
    const i64 panels = (linear.outputs + width - 1) / width;
    const i64 steps = linear.inputs / kLane<T>;
    const i64 enough = (engine.pool.num_threads() * 4 + panels - 1) / panels;  // row blocks that keep every thread busy
    const i64 row_blocks =
        std::max((rows + kPanelRows - 1) / kPanelRows, std::clamp<i64>(enough, 1, (rows + 47) / 48));
    const T* packed = static_cast<const T*>(linear.packed);
    engine.pool.run(panels * row_blocks, [&](i64 chunk, int) {
        // Ascending panels, as chunks come in descending order. No prefetch instructions: the hardware's own is faster.
        const i64 panel = panels - 1 - chunk / row_blocks, row_block = chunk % row_blocks;
        const i64 begin = rows * row_block / row_blocks, end = rows * (row_block + 1) / row_blocks;
        const T* weights = packed + panel * linear.inputs * kPanel;
        alignas(64) float c[kPanelRows * kPanel];
        for (i64 step = 0; step < steps; step += kPanelSteps)
            product(end - begin, kPanel, x + begin * linear.inputs + step * kLane<T>, linear.inputs,
                    weights + step * kPanel * kLane<T>, kPanel * kLane<T>, std::min<i64>(kPanelSteps, steps - step), c,
                    kPanel, step > 0);
        write_outputs<T>(linear, output, panel, end - begin, c, out, begin);
    });
}

template <class T> void pack_weight(Engine& engine, const T* weight, i64 inputs, i64 outputs, bool gated, T* packed) {
    const i64 width = gated ? kPanel / 2 : kPanel;
    const i64 panels = (outputs + width - 1) / width;
    engine.pool.run(panels, [&](i64 panel, int) {
        T* target = packed + panel * inputs * kPanel;
        for (i64 column = 0; column < kPanel; ++column) {
            const i64 output = panel * width + column % width;
            const T* source = weight + (output + (column / width) * outputs) * inputs;
            for (i64 k = 0; k < inputs; ++k)
                target[(k / kLane<T> * kPanel + column) * kLane<T> + k % kLane<T>] = output < outputs ? source[k] : T(0);
        }
    });
}

}  // namespace

// The micro-kernel of float matrix products on vectors.
//
// Each output is summed over k by itself and in a fixed order, so a row's result is the same bits in any batch.

#pragma once

#include "step/engine.h"

namespace {

constexpr int kPanel = 64;      // outputs of a packed panel: 4 vectors
constexpr int kPanelRows = 96;  // of a product on vectors

template <int N> using Count = std::integral_constant<int, N>;

// Calls body(Count<n>), n from 1 to Max.
template <int Max, class F> inline void with_count(i64 n, const F& body) {
    if constexpr (Max > 1)
        if (n < Max) return with_count<Max - 1>(n, body);
    body(Count<Max>{});
}

// Calls body(first_row, Count<n>) for tiles of n ≤ Max rows, of sizes as equal as possible.
template <int Max = kMaxRows, class F> inline void for_row_tiles(i64 rows, const F& body) {
    const i64 tiles = (rows + Max - 1) / Max;
    for (i64 tile = 0, row = 0; tile < tiles; ++tile) {
        const i64 count = (rows - row + tiles - tile - 1) / (tiles - tile);
        with_count<Max>(count, [&](auto exact) { body(row, exact); });
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

// Where b lies. From memory it is prefetched, beyond its end too: a thread's next panel lies there.
enum class Source { kMemory, kCache };

// c[R][16 V] (+)= a[R][steps × lane] × b[steps][16 V × lane]; lda and ldb in elements, ldc in floats.
template <int R, int V, Source source, class T>
void register_product(const T* a, i64 lda, const T* b, i64 ldb, i64 steps, float* c, i64 ldc, bool add) {
    Floats acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] = add ? load(c + r * ldc + 16 * v) : broadcast(0.0f);
    for (i64 k = 0; k < steps; ++k) {
        Floats w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const float* lanes = reinterpret_cast<const float*>(b + k * ldb) + 16 * v;
            if constexpr (source == Source::kMemory) prefetch_ahead(lanes);
            w[v] = load(lanes);
        }
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
template <Source source = Source::kCache, class T>
void vector_product(i64 rows, i64 columns, const T* a, i64 lda, const T* b, i64 ldb, i64 steps, float* c, i64 ldc,
                    bool add) {
    for_row_tiles(rows, [&](i64 row, auto num_rows) {
        constexpr int R = decltype(num_rows)::value;
        for_column_tiles<R>(0, columns, [&](i64 column, auto num_vectors) {
            constexpr int V = decltype(num_vectors)::value;
            const auto multiply = row == 0 ? register_product<R, V, source, T> : register_product<R, V, Source::kCache, T>;
            multiply(a + row * lda, lda, b + column * kLane<T>, ldb, steps, c + row * ldc + column, ldc, add);
        });
    });
}

constexpr i64 kWideSteps = 32;  // of a panel: 16 KB in fp32, which stay in L1 with some rows

// The same for a panel of bf16 from memory and up to kPanelRows rows: widens each part of b only once. Bits are equal.
// For vector layers with kWideRows.
template <class T> void widened_product(i64 rows, const T* a, i64 lda, const T* panel, i64 steps, float* c) {
    constexpr i64 stride = 2 * kWideSteps;
    alignas(64) float wide_a[kPanelRows * stride], wide_b[kPanel * stride];
    for (i64 step = 0; step < steps; step += kWideSteps) {
        const i64 part = std::min(kWideSteps, steps - step), inputs = 2 * part;
        for (i64 r = 0; r < rows; ++r)
            for (i64 k = 0; k < inputs; k += 16)
                store(wide_a + r * stride + k, load(a + r * lda + 2 * step + k, inputs - k));
        for (i64 k = 0; k < part; ++k)
            for (i64 column = 0; column < kPanel; column += 16) {
                const T* pairs = panel + ((step + k) * kPanel + column) * 2;
                prefetch_ahead(pairs);
                store_pairs(wide_b + column * stride + 32 * k, pairs);
            }
        for (i64 column = 0; column < kPanel; column += 16)
            for_row_tiles<kWideRows>(rows, [&](i64 row, auto num_rows) {
                register_product<decltype(num_rows)::value, 1, Source::kCache>(
                    wide_a + row * stride, stride, wide_b + column * stride, 16, inputs, c + row * kPanel + column,
                    kPanel, step > 0);
            });
    }
}

}  // namespace

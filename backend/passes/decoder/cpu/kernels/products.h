// The micro-kernel of float matrix products on vectors.
//
// Each output is summed over k by itself and in a fixed order, so a row's result is the same bits in any batch.

#pragma once

#include "engine.h"

namespace {

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

}  // namespace

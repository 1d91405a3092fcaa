// The products of a softmax block on vectors: queries × keys and weights × values of one kv head.
//
// Keys and values are multiplied where they lie. Meanwhile the next block is prefetched: a core by itself does not ask
// for it early enough, as the work on a block's values waits for its softmax.

#pragma once

#include "attention/block_cursor.h"

namespace {

// How numbers of a cache are multiplied: the type of the other factors, and of sums.
template <class C> struct Products {
    using Factor = C;
    using Sums = Floats;
    static Floats load(const C* p) { return ::load(reinterpret_cast<const float*>(p)); }
};
template <> struct Products<Q8> {
    using Factor = std::int16_t;
    using Sums = IntSums;
    static Ints load(const Q8* p) { return load_pairs(&p->number); }
};

template <class C, int R, int V> struct ProductSums {
    typename Products<C>::Sums at[R][V];

    // Calls body(r, v) for each sum.
    template <class F> [[gnu::always_inline]] static void each(const F& body) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) body(r, v);
    }

    // Adds factors[R][steps × lane] × columns[steps][V], whose rows are `stride` numbers apart.
    // Fetch: a std::bool_constant, whether columns.next are prefetched.
    template <class Fetch>
    [[gnu::always_inline]] void add(const typename Products<C>::Factor* factors, i64 ld, const Columns<C, V>& columns,
                                    i64 stride, i64 steps, Fetch) {
        for (i64 k = 0; k < steps; ++k) {
            decltype(Products<C>::load(nullptr)) numbers[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                numbers[v] = Products<C>::load(columns.now[v] + k * stride);
                if constexpr (Fetch::value) __builtin_prefetch(columns.next[v] + k * stride);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v)
                    at[r][v] = multiply_add(at[r][v], factors + r * ld + k * kLane<C>, numbers[v]);
        }
    }
};

// Calls body(row, Count<R>, column, Count<V>, fetch) for tiles of rows and of columns. fetch is true for the first rows:
// they read keys or values from memory, the others from a cache.
template <class F> void for_block_tiles(i64 rows, i64 columns, const F& body) {
    for_row_tiles(rows, [&](i64 row, auto num_rows) {
        for_column_tiles<num_rows>(0, columns, [&](i64 column, auto num_vectors) {
            if (row == 0) body(row, num_rows, column, num_vectors, std::true_type{});
            else body(row, num_rows, column, num_vectors, std::false_type{});
        });
    });
}

// The same for columns in whole tiles of 16 Most, which compiles faster.
template <int Most, class F> void for_whole_block_tiles(i64 rows, i64 first_column, i64 columns, const F& body) {
    for_row_tiles(rows, [&](i64 row, auto num_rows) {
        constexpr int V = std::min(Most, max_vectors(num_rows));
        for (i64 column = first_column; column < columns; column += 16 * V)
            if (row == 0) body(row, num_rows, column, Count<V>{}, std::true_type{});
            else body(row, num_rows, column, Count<V>{}, std::false_type{});
    });
}

}  // namespace

// Products of bf16 by tiles: registers of 16 rows × 64 bytes, in the CPU (AMX) or emulated.
//
// Of bf16 each output is summed over tiles of 16 pairs in order; within a tile in the order of TDPBF16PS. Zeros fill the
// last tile. So a row's result is the same bits in any batch; they are not those of vector_product.

#pragma once

#include "linears/products.h"

namespace {

constexpr int kTileRows = 16;  // and pairs in a row

// The operand of LDTILECFG.
struct alignas(64) TileConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};

}  // namespace

#if defined(PENSTOCK_EMULATED_TILES)
#include "vectors/tiles_emulated.h"
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include "vectors/tiles_amx.h"
#endif

namespace {

#if defined(PENSTOCK_EMULATED_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__))

constexpr bool kHasTiles = true;

// Tiles 0 to 3 are sums, for 64 columns; 4 has rows of a, 5 and 6 have rows of b.
inline thread_local i64 configured_rows = 0;

// Configures this thread's tiles for products of up to 16 rows.
inline void configure_tiles(i64 rows) {
    if (rows == configured_rows) return;
    TileConfig config;
    for (int tile = 0; tile < 7; ++tile) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = std::uint8_t(tile < 5 ? rows : kTileRows);
    }
    load_tile_config(config);
    configured_rows = rows;
}

// This thread's tiles stay configured as long as it exists.
struct TileScope {
    ~TileScope() {
        if (configured_rows) release_tiles();
        configured_rows = 0;
    }
};

// Reads 1 KB into the L2 cache, from 768 bytes after p on. The CPU follows the rows of tiles less well than plain loads.
inline void fetch_ahead(const void* p) {
    for (i64 line = 0; line < 16; ++line) __builtin_prefetch(static_cast<const char*>(p) + 768 + 64 * line, 0, 2);
}

// Calls body(Count<n>) for n from 0 to Columns - 1.
template <int Columns, class F> inline void each_column(const F& body) {
    body(Count<0>{});
    if constexpr (Columns > 1) body(Count<1>{});
    if constexpr (Columns > 2) body(Count<2>{});
    if constexpr (Columns > 3) body(Count<3>{});
}

// c[rows][16 Columns] (+)= a[rows][16 × tiles pairs] × b[16 × tiles][16 Columns pairs]
template <int Columns, bool Fetch>
void multiply_rows(const bf16* a, i64 lda, const bf16* b, i64 ldb, i64 tiles, float* c, i64 ldc, bool add) {
    const i64 a_bytes = lda * i64(sizeof(bf16)), b_bytes = ldb * i64(sizeof(bf16)), c_bytes = ldc * i64(sizeof(float));
    each_column<Columns>([&](auto n) {
        if (add) load_tile<n>(c + 16 * n, c_bytes);
        else zero_tile<n>();
    });
    for (i64 k = 0; k < tiles; ++k) {
        load_tile<4>(a + k * 32, a_bytes);
        each_column<Columns>([&](auto n) {
            if constexpr (Fetch) fetch_ahead(b + k * 16 * ldb + 512 * n);
            load_tile<5 + n % 2>(b + k * 16 * ldb + 32 * n, b_bytes);
            multiply_tiles<n, 4, 5 + n % 2>();
        });
    }
    each_column<Columns>([&](auto n) { store_tile<n>(c + 16 * n, c_bytes); });
}

// Copies rows of pairs; zeros fill up the target.
inline void copy_pairs(const bf16* from, i64 ld, i64 rows, i64 pairs, bf16* to, i64 to_rows, i64 to_pairs) {
    std::memset(to, 0, to_rows * to_pairs * 2 * sizeof(bf16));
    for (i64 r = 0; r < rows; ++r) std::memcpy(to + r * to_pairs * 2, from + r * ld, pairs * 2 * sizeof(bf16));
}

// As vector_product, for bf16. The caller holds a TileScope.
inline void tile_product(i64 rows, i64 columns, const bf16* a, i64 lda, const bf16* b, i64 ldb, i64 steps, float* c,
                         i64 ldc, bool add) {
    const i64 tiles = steps / kTileRows, rest = steps % kTileRows;
    for (i64 row = 0; row < rows; row += kTileRows) {
        const i64 count = std::min<i64>(rows - row, kTileRows);
        configure_tiles(count);
        const bf16* from = a + row * lda;
        alignas(64) bf16 a_rest[kTileRows * 32];
        if (rest > 0) copy_pairs(from + tiles * 32, lda, count, rest, a_rest, count, 16);
        for (i64 column = 0; column < columns; column += 64) {
            with_count<4>((columns - column) / 16, [&](auto n) {
                float* to = c + row * ldc + column;
                const bf16* columns_of_b = b + 2 * column;
                if (tiles > 0) {
                    if (row == 0 && ldb == 32 * n)
                        multiply_rows<n, true>(from, lda, columns_of_b, ldb, tiles, to, ldc, add);
                    else multiply_rows<n, false>(from, lda, columns_of_b, ldb, tiles, to, ldc, add);
                }
                if (rest == 0) return;
                alignas(64) bf16 b_rest[kTileRows * 32 * n];
                copy_pairs(columns_of_b + tiles * 16 * ldb, ldb, rest, 16 * n, b_rest, kTileRows, 16 * n);
                multiply_rows<n, false>(a_rest, 32, b_rest, 32 * n, 1, to, ldc, add || tiles > 0);
            });
        }
    }
}

#else

constexpr bool kHasTiles = false;
struct TileScope {};
inline int request_tiles() { return -1; }

#endif

}  // namespace

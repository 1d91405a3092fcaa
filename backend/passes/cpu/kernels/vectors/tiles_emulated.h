// The tile layer in plain C++: the same results, bit for bit, as AMX. It is slow, for tests. Included by tiles.h.

#pragma once

namespace {

struct TileRegisters {
    TileConfig config;
    alignas(64) std::uint8_t bytes[8][16][64];
};
inline thread_local TileRegisters tile_registers;

inline int request_tiles() { return 0; }

inline void load_tile_config(const TileConfig& config) {
    std::memset(&tile_registers, 0, sizeof tile_registers);
    tile_registers.config = config;
}

inline void release_tiles() { load_tile_config(TileConfig{}); }

template <int Tile> void zero_tile() { std::memset(tile_registers.bytes[Tile], 0, sizeof tile_registers.bytes[Tile]); }

template <int Tile> void load_tile(const void* p, i64 row_bytes) {
    const TileConfig& config = tile_registers.config;
    zero_tile<Tile>();
    for (i64 r = 0; r < config.rows[Tile]; ++r)
        std::memcpy(tile_registers.bytes[Tile][r], static_cast<const char*>(p) + r * row_bytes, config.row_bytes[Tile]);
}

template <int Tile> void store_tile(void* p, i64 row_bytes) {
    const TileConfig& config = tile_registers.config;
    for (i64 r = 0; r < config.rows[Tile]; ++r)
        std::memcpy(static_cast<char*>(p) + r * row_bytes, tile_registers.bytes[Tile][r], config.row_bytes[Tile]);
}

// A number below the smallest normal one becomes 0 of its sign, as operand and as result.
inline float flush(float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

// a × b + c. Whether a result is below the smallest normal number is decided before its last bits are lost.
inline float fused(float a, float b, float c) {
    a = flush(a), b = flush(b), c = flush(c);
    const float x = std::fma(a, b, c);
    if (std::fabs(x) != std::numeric_limits<float>::min()) return flush(x);
    const float scaled = std::fma(a * 0x1p12f, b * 0x1p12f, c * 0x1p24f);
    return std::fabs(scaled) < std::numeric_limits<float>::min() * 0x1p24f ? std::copysign(0.0f, x) : x;
}

// As TDPBF16PS is documented: products of the pairs' first and second numbers are summed apart, in the order of the
// pairs and from 0; then the two sums are added to each other, and this to C.
template <int C, int A, int B> void multiply_tiles() {
    const TileConfig& config = tile_registers.config;
    for (i64 r = 0; r < config.rows[C]; ++r) {
        float first[16] = {}, second[16] = {};
        for (i64 k = 0; k < config.row_bytes[A] / 4; ++k) {
            bf16 a[2], pairs[32];
            std::memcpy(a, tile_registers.bytes[A][r] + 4 * k, sizeof a);
            std::memcpy(pairs, tile_registers.bytes[B][k], sizeof pairs);
            for (i64 n = 0; n < 16; ++n) {
                first[n] = fused(to_float(a[0]), to_float(pairs[2 * n]), first[n]);
                second[n] = fused(to_float(a[1]), to_float(pairs[2 * n + 1]), second[n]);
            }
        }
        float c[16];
        std::memcpy(c, tile_registers.bytes[C][r], sizeof c);
        for (i64 n = 0; n < 16; ++n) c[n] = flush(flush(c[n]) + flush(first[n] + second[n]));
        std::memcpy(tile_registers.bytes[C][r], c, sizeof c);
    }
}

}  // namespace

// What the operations share: the model's shape, the step in progress, threads and their scratch memory.

#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "vectors.h"

namespace {

constexpr int kMaxTileRows = 24;  // queries × heads of a group that share one read of keys and values
constexpr int kBlock = 64;        // key positions per softmax block, whatever the pages' size
constexpr int kPiece = 512;       // key positions after which softmax starts anew, to be merged: what threads may share
constexpr int kMaxHeadDim = 1024;

struct Linear {  // mirrored by native_ops.py
    const void* packed;
    const float* bias;  // [outputs], or null; of a gated pair [gate | up]
    i64 inputs;
    i64 outputs;  // of a gated pair: of one of the two
};

struct Attention {  // mirrored by native_ops.py
    void* cache;
    const float* q_norm;  // [head_dim] or null, and so k_norm
    const float* k_norm;
    i64 window;  // tokens, or 0
    i64 uses_rope;
};

enum CacheForm : i64 { kFloatCache = 0, kBf16Cache = 1, kQ8Cache = 2 };  // as in native_ops.py

struct Shape {  // mirrored by native_ops.py
    i64 hidden;
    i64 num_heads;
    i64 num_kv_heads;
    i64 head_dim;
    i64 rotary_dim;
    i64 page_size;
    i64 act_bf16;
    i64 cache_form;
    float eps;
};

// Query tokens of one row that share a pass over its keys: tokens [token, token + count) of the step, at positions
// [position, position + count), written to rows from `out` of the output.
struct Tile {
    i64 row, token, count, position, out;
};

// What one thread takes on at a time: a tile for kv heads [head, last_head), over all its pieces or, where `partial`
// is not negative, over one, whose result goes to that place for a Merge.
struct Item {
    Tile tile;
    i64 head, last_head;
    i64 piece, partial;
};

// A single token's kv head whose pieces [0, num_pieces) stand at `partial` and after.
struct Merge {
    Tile tile;
    i64 head, num_pieces, partial;
};

struct Work {
    std::vector<Item> items;
    std::vector<Merge> merges;
};

struct Step {
    std::vector<std::int32_t> positions;
    std::vector<i64> slots;  // page × page_size + place, for each token
    Work work, last_work;
    std::vector<i64> last_tokens;
    const std::int32_t* page_table = nullptr;
    i64 page_table_width = 0;
    i64 num_tokens = 0;
};

struct Engine {
    Pool pool;
    Shape shape;
    Step step;
    std::vector<std::vector<float>> scratch;  // of each thread
    std::vector<float> partials;              // of split rows, between their pieces and the merge

    Engine(int num_threads, i64 spin_ns, const Shape& s) : pool(num_threads, spin_ns), shape(s), scratch(num_threads) {}

    i64 group() const { return shape.num_heads / shape.num_kv_heads; }
    i64 tile_rows() const { return std::max<i64>(kMaxTileRows, group()); }

    bool in_place() const { return shape.page_size % 16 == 0; }

    // Positions that lie together: the largest part of a block that no page's end cuts.
    i64 segment() const {
        if (!in_place()) return kBlock;
        return shape.page_size % 64 == 0 ? 64 : shape.page_size % 32 == 0 ? 32 : 16;
    }

    // Runs body(first, last, thread) over [0, count) in pieces of about grain, or at once where there is one piece.
    template <class F> void split(i64 count, i64 grain, const F& body) {
        const i64 pieces = std::clamp<i64>(count / std::max<i64>(grain, 1), 1, i64(pool.num_threads()) * 4);
        pool.run(pieces, [&](i64 piece, int thread) { body(count * piece / pieces, count * (piece + 1) / pieces, thread); });
    }
};

}  // namespace

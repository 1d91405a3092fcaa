// Paged attention. Softmax runs over blocks of 64 positions and starts again every 512, both at fixed positions of the
// sequence; the results of the pieces of 512 are merged in order. So a token's result is the same bits in any batch,
// with any prefill chunks, in any pages, and whether one thread computed its pieces or many.

#pragma once

#include "attention/softmax_block_q8.h"

namespace {

// Writes the output of one kv head: state's rows from first_row on are [token][query head of the group].
template <class T>
void write_rows(const Engine& engine, const T* qkv, const Attention& layer, const SoftmaxState& state, i64 first_row,
                const Tile& tile, i64 kv_head, T* out) {
    const i64 dim = engine.shape.head_dim, group = engine.group();
    for (i64 r = 0; r < tile.count * group; ++r) {
        const i64 head = kv_head * group + r % group;
        const Floats norm = broadcast(layer.sinks ? state.factor_with_sink(first_row + r, layer.sinks[head])
                                                  : 1.0f / state.sums[first_row + r]);
        T* target = out + ((tile.out + r / group) * engine.shape.num_heads + head) * dim;
        const float* row = state.acc + (first_row + r) * dim;
        if (!engine.shape.num_gates) {
            for (i64 d = 0; d < dim; d += 16) store(target + d, mul(load(row + d), norm));
            continue;
        }
        const T* gate = qkv + (tile.token + r / group) * engine.row_size(layer) + (engine.shape.num_heads + head) * dim;
        for (i64 d = 0; d < dim; d += 16) store(target + d, mul(mul(load(row + d), norm), sigmoid(load(gate + d))));
    }
}

// The position behind the last that the tile's t-th token sees. It grows with t.
inline i64 visible_end(const Engine& engine, const Attention& layer, const Tile& tile, i64 t) {
    return layer.sees_ahead && engine.step.ends ? engine.step.ends[tile.token + t] : tile.position + t + 1;
}

// Adds to `state` the softmax of the item's queries over the positions in [first, end) that each may see. The item goes
// on to item_end.
template <class Block>
void attend_piece(const Engine& engine, const Attention& layer, const WorkItem& item, i64 first, i64 end, i64 item_end,
                  Block& block, const typename Block::Number* queries, const float* query_scales, Visible* visible,
                  const SoftmaxState& state) {
    const Tile& tile = item.tile;
    const i64 dim = engine.shape.head_dim, group = engine.group(), rows = tile.count * group;
    for (; first < end; first += kBlock) {
        for (i64 t = 0; t < tile.count; ++t) {
            const i64 position = tile.position + t;
            const i64 first_seen = layer.window ? position - layer.window + 1 : layer.first_key;
            const i64 from = std::max<i64>(0, first_seen - first);
            const i64 to = visible_end(engine, layer, tile, t) - first;
            std::fill_n(visible + t * group, group, Visible{from, std::min<i64>(kBlock, to)});
        }
        for (i64 head = item.head; head < item.last_head; ++head) {
            const i64 row = (head - item.head) * rows;
            const BlockRange now{head, first, std::min(first + kBlock, end)};
            const BlockRange next = head + 1 < item.last_head
                                        ? BlockRange{head + 1, now.first, now.end}
                                        : BlockRange{item.head, now.end, std::min(now.end + kBlock, item_end)};
            block.add(now, next.first < item_end ? &next : nullptr, queries + row * dim, query_scales + row, visible,
                      state.rows_from(row, dim));
        }
    }
}

template <class T, class Block>
void attend(Engine& engine, const T* qkv, const Attention& layer, const WorkItem& item, T* out,
            std::vector<float>& memory) {
    const Shape& shape = engine.shape;
    const Tile& tile = item.tile;
    const i64 dim = shape.head_dim, group = engine.group(), heads = item.last_head - item.head;
    const i64 rows = tile.count * group, all_rows = heads * rows;
    const TileScope scope;
    Scratch scratch(memory);
    Block block(engine, layer, tile.row, rows, scratch);
    auto* queries = scratch.take<typename Block::Number>(all_rows * dim);
    float* query_scales = scratch.take<float>(all_rows);
    Visible* visible = scratch.take<Visible>(rows);
    const i64 floats = SoftmaxState::floats(all_rows, dim);
    const SoftmaxState later(scratch.take<float>(floats), all_rows, dim);
    float* result = item.partial < 0 ? scratch.take<float>(floats)
                                     : engine.partials.data() + item.partial * SoftmaxState::floats(group, dim);
    const SoftmaxState state(result, all_rows, dim);

    for (i64 i = 0; i < all_rows; ++i) {
        const i64 token = (layer.stores ? tile.token : tile.out) + i % rows / group, head = (item.head + i / rows) * group + i % group;
        const T* q = qkv + token * engine.row_size(layer) + head * dim;
        query_scales[i] = block.load_query(q, queries + i * dim) * (kLog2E * shape.score_scale);
    }
    const i64 end = visible_end(engine, layer, tile, tile.count - 1);
    const i64 start = layer.window ? std::max<i64>(0, tile.position - layer.window + 1) : 0;
    const i64 first_piece = item.partial < 0 ? start / kPiece : item.piece;
    const i64 last_piece = item.partial < 0 ? (end - 1) / kPiece : item.piece;
    const i64 item_end = std::min(end, (last_piece + 1) * kPiece);
    for (i64 piece = first_piece; piece <= last_piece; ++piece) {
        const SoftmaxState& target = piece == first_piece ? state : later;
        target.clear(all_rows, dim);
        attend_piece(engine, layer, item, std::max(start / kBlock * kBlock, piece * kPiece),
                     std::min(end, (piece + 1) * kPiece), item_end, block, queries, query_scales, visible,
                     target);
        if (piece > first_piece) state.merge(later, all_rows, dim);
    }
    if (item.partial >= 0) return;
    for (i64 h = 0; h < heads; ++h) write_rows(engine, qkv, layer, state, h * rows, tile, item.head + h, out);
}

// Scratch floats that one thread needs for any work item: for all its rows, for the rows of one head, for a block.
inline i64 scratch_floats(const Engine& engine) {
    const i64 dim = std::max(engine.shape.head_dim, engine.shape.other.head_dim);
    const i64 rows = std::max(engine.tile_rows(), engine.shape.num_heads);
    return rows * (2 * (dim + 2) + dim + 1) + rows * (2 * kBlock + 6 + dim + dim / kQ8Block) + 4 * kBlock * dim + 16 * 16;
}

template <class T, class Block>
void run_attention(Engine& engine, const T* qkv, const Attention& layer, T* out) {
    const Step& step = engine.step;
    const Work& work = (step.is_narrowed ? step.last_work : step.work)[engine.has_other_heads];
    engine.pool.run(i64(work.items.size()), [&](i64 chunk, int thread) {
        attend<T, Block>(engine, qkv, layer, work.items[chunk], out, engine.scratch[thread]);
    });
    const i64 rows = engine.group(), dim = engine.shape.head_dim, floats = SoftmaxState::floats(rows, dim);
    engine.pool.run(i64(work.merges.size()), [&](i64 chunk, int) {
        const Merge& merge = work.merges[chunk];
        const auto piece_state = [&](i64 piece) {
            float* memory = engine.partials.data() + (merge.partial + piece * merge.num_heads) * floats;
            return SoftmaxState(memory, merge.num_heads * rows, dim).rows_from(merge.item_head * rows, dim);
        };
        const SoftmaxState state = piece_state(0);
        for (i64 piece = 1; piece < merge.num_pieces; ++piece) {
            if (piece + 1 < merge.num_pieces) piece_state(piece + 1).prefetch(rows, dim);
            state.merge(piece_state(piece), rows, dim);
        }
        write_rows(engine, qkv, layer, state, 0, merge.tile, merge.head, out);
    });
}

}  // namespace

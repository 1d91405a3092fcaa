// One softmax block of 64 key positions for the queries of one kv head: scores, softmax and the weighted sum of values,
// for a cache of floats. Positions without a token may hold anything, NaN too: their scores are replaced, and their values
// are not read, not even to be multiplied by 0.

#pragma once

#include "attention/softmax_state.h"

namespace {

// Queries and weights are rounded to C, the type of both factors.
template <class C> class FloatBlock {
  public:
    using Number = C;

    FloatBlock(const Engine& engine, const Attention& layer, i64 row, i64 rows, Scratch& scratch)
        : engine_(engine), cursor_(engine, layer, row, scratch), dim_(engine.shape.head_dim), rows_(rows),
          softcap_(engine.shape.scores_softcap), scores_(scratch.take<float>(rows * kBlock)), factors_(scratch.take<float>(rows)),
          tops_(scratch.take<float>(rows)), weights_(scratch.take<C>(rows * kBlock)),
          values_(scratch.take<C>(2 * kTileRows * dim_)) {}

    // Returns the factor for this query's scores.
    template <class T> float load_query(const T* q, C* query) const {
        for (i64 d = 0; d < dim_; d += 16) store(query + d, load(q + d));
        return 1.0f;
    }

    // Adds a block to the rows' softmax. queries [rows][head_dim]; visible: the positions that each row may see.
    void add(const BlockRange& block, const BlockRange* next, const C* queries, const float* query_scales,
             const Visible* visible, const SoftmaxState& state) {
        cursor_.move(block, next);
        const bool tiles = uses_tiles<C>(engine_);
        if (tiles) score_on_tiles(queries);
        else score(queries);
        update_softmax(rows_, scores_, query_scales, softcap_, visible, state, factors_, tops_, weights_);
        if (tiles) add_values_on_tiles(state.acc);
        else add_values(state.acc);
    }

  private:
    void score(const C* queries) {
        for_whole_block_tiles<4>(rows_, 0, kBlock, [&](i64 row, auto num_rows, i64 column, auto num_vectors,
                                                       auto fetch) {
            ProductSums<C, num_rows, num_vectors> sums;
            sums.each([&](int r, int v) { sums.at[r][v] = broadcast(0.0f); });
            sums.add(queries + row * dim_, dim_, cursor_.template keys<num_vectors>(column, 0), cursor_.key_stride(),
                     dim_ / kLane<C>, fetch);
            sums.each([&](int r, int v) { store(scores_ + (row + r) * kBlock + column + 16 * v, sums.at[r][v]); });
        });
    }

    // acc [rows][head_dim] = acc × factors + weights × values.
    void add_values(float* acc) {
        constexpr int lane = kLane<C>;
        const i64 last = cursor_.count() / lane * lane;  // at most one position does not fill its lane
        const C* rest = last < cursor_.count() ? gather_values(last, lane) : nullptr;
        for_block_tiles(rows_, dim_, [&](i64 row, auto num_rows, i64 column, auto num_vectors, auto fetch) {
            ProductSums<C, num_rows, num_vectors> sums;
            float* target = acc + row * dim_ + column;
            const C* weights = weights_ + row * kBlock;
            sums.each([&](int r, int v) {
                sums.at[r][v] = mul(load(target + r * dim_ + 16 * v), broadcast(factors_[row + r]));
            });
            for (i64 at = 0; at < cursor_.count(); at += cursor_.segment())
                sums.add(weights + at, kBlock, cursor_.template values<num_vectors>(at, column), dim_ * lane,
                         cursor_.positions(at) / lane, fetch);
            if (rest) sums.add(weights + last, kBlock, columns_of<num_vectors>(rest, column), 0, 1, std::false_type{});
            sums.each([&](int r, int v) { store(target + r * dim_ + 16 * v, sums.at[r][v]); });
        });
    }

    template <int V> static Columns<C, V> columns_of(const C* values, i64 column) {
        Columns<C, V> columns;
        for (int v = 0; v < V; ++v) columns.now[v] = columns.next[v] = values + (column + 16 * v) * kLane<C>;
        return columns;
    }

    void score_on_tiles(const C* queries) {
        const i64 segment = cursor_.segment();
        for (i64 at = 0; at < cursor_.count(); at += segment)
            product(engine_, rows_, segment, queries, dim_, cursor_.now(at).keys, cursor_.key_stride(), dim_ / kLane<C>,
                    scores_ + at, kBlock, false);
    }

    // Multiplies 32 positions of the block at a time, at fixed places.
    void add_values_on_tiles(float* acc) {
        constexpr int lane = kLane<C>, unit = kTileRows * lane;
        for (i64 r = 0; r < rows_; ++r) {
            if (factors_[r] == 1.0f) continue;
            for (float* x = acc + r * dim_; x < acc + (r + 1) * dim_; x += 16)
                store(x, mul(load(x), broadcast(factors_[r])));
        }
        const i64 segment = cursor_.segment(), count = cursor_.count();
        for (i64 at = 0, positions; at < count; at += positions) {
            positions = std::min(segment - cursor_.offset(at), count - at) / unit * unit;
            const C* values = positions ? cursor_.values_at(at) : gather_values(at, positions = unit);
            product(engine_, rows_, dim_, weights_ + at, kBlock, values, dim_ * lane, positions / lane, acc, dim_, true);
        }
    }

    // Copies positions [at, at + count) of the block, both multiples of the lane; zeros where there is no token.
    const C* gather_values(i64 at, i64 count) {
        constexpr int lane = kLane<C>;
        for (i64 i = 0; i < count; i += lane) {
            C* target = values_ + i * dim_;
            const i64 left = cursor_.count() - at - i;
            if (left > 0) std::memcpy(target, cursor_.values_at(at + i), lane * dim_ * sizeof(C));
            else std::memset(target, 0, lane * dim_ * sizeof(C));
            if (lane == 2 && left == 1)
                for (i64 d = 0; d < dim_; ++d) target[2 * d + 1] = 0;
        }
        return values_;
    }

    const Engine& engine_;
    BlockCursor<C> cursor_;
    const i64 dim_, rows_;
    const float softcap_;
    float* scores_;
    float* factors_;
    float* tops_;
    C* weights_;
    C* values_;  // gathered
};

}  // namespace

// A softmax block over a q8_0 cache. Queries and weights become int16, so all products are integer products with exact
// sums. Each sum is scaled once per 32 dimensions (scores) or 64 positions (values). A query's scale comes from its
// largest number. A block's weights have one scale per 32 dimensions: the largest weight times the largest value scale.
// This reads half the bytes of bf16 and never writes the cache out in a wider type.

#pragma once

#include "attention/softmax_block.h"

namespace {

constexpr float kShortMax = 32767.0f;

// The factor that turns numbers of at most top into int16; 0 if top is below 1e-30.
inline Floats to_short_range(float top) { return broadcast(top >= 1e-30f ? kShortMax / top : 0.0f); }

class Q8Block {  // see FloatBlock
  public:
    using Number = std::int16_t;

    Q8Block(const Engine& engine, const Attention& layer, i64 row, i64 rows, Scratch& scratch)
        : cursor_(engine, layer, row, scratch), dim_(engine.shape.head_dim), rows_(rows), parts_(dim_ / kQ8Block),
          softcap_(engine.shape.scores_softcap), scores_(scratch.take<float>(rows * kBlock)),
          factors_(scratch.take<float>(rows)), tops_(scratch.take<float>(rows)),
          weights_(scratch.take<std::int16_t>(rows * parts_ * kBlock)),
          weight_scales_(scratch.take<float>(rows * parts_)), value_scales_(scratch.take<float>(parts_ * kBlock)),
          top_scales_(scratch.take<float>(parts_)) {}

    template <class T> float load_query(const T* q, std::int16_t* query) const {
        const float top = largest_magnitude(q, dim_);
        const Floats factor = to_short_range(top);
        for (i64 d = 0; d < dim_; d += 16) store_shorts(query + d, mul(load(q + d), factor));
        return top / kShortMax;
    }

    void add(const BlockRange& block, const BlockRange* next, const std::int16_t* queries, const float* query_scales,
             const Visible* visible, const SoftmaxState& state) {
        cursor_.move(block, next);
        for (i64 at = 0; at < cursor_.count(); at += cursor_.segment()) fetch_scales(cursor_.next(at));
        score(queries);
        update_softmax(rows_, scores_, query_scales, softcap_, visible, state, factors_, tops_, scores_);
        widen_value_scales();
        for (i64 r = 0; r < rows_; ++r) round_weights(r, visible[r]);
        add_values(state.acc);
    }

  private:
    void fetch_scales(const Segment<Q8>& segment) const {
        for (i64 b = 0; b < parts_; ++b) {
            __builtin_prefetch(segment.key_scales + b * segment.scale_stride);
            __builtin_prefetch(segment.value_scales + b * segment.scale_stride);
        }
    }

    void score(const std::int16_t* queries) {
        for_whole_block_tiles<4>(rows_, 0, kBlock, [&](i64 row, auto num_rows, i64 column, auto num_vectors,
                                                       auto fetch) {
            for (i64 b = 0; b < parts_; ++b) {
                ProductSums<Q8, num_rows, num_vectors> sums;
                sums.each([&](int r, int v) { sums.at[r][v] = IntSums{}; });
                sums.add(queries + row * dim_ + b * kQ8Block, dim_, cursor_.keys<num_vectors>(column, b * kQ8Block),
                         cursor_.key_stride(), kQ8Block / 2, fetch);
                Floats scales[num_vectors];
                for (int v = 0; v < num_vectors; ++v) {
                    const Segment<Q8>& at = cursor_.now(column + 16 * v);
                    scales[v] = load_halves(at.key_scales + b * at.scale_stride + cursor_.offset(column + 16 * v));
                }
                sums.each([&](int r, int v) {
                    float* target = scores_ + (row + r) * kBlock + column + 16 * v;
                    const Floats sum = to_floats(sums.at[r][v]);
                    store(target, b == 0 ? mul(sum, scales[v]) : fmadd(sum, scales[v], load(target)));
                });
            }
        });
    }

    // Weights of row r times the values' scales, as int16.
    void round_weights(i64 r, const Visible& visible) {
        const float* weights = scores_ + r * kBlock;
        const float to_one = tops_[r] < 1e-20f ? 0.0f : 1.0f / tops_[r];
        for (i64 b = 0; b < parts_; ++b) {
            // The scale covers positions below `to` only, so that it does not depend on the tile's other queries.
            const float* scales = value_scales_ + b * kBlock;
            const float top_scale = visible.to >= kBlock ? top_scales_[b] : largest_of(scales, visible.to);
            const Floats range = mul(to_short_range(top_scale), broadcast(to_one));
            std::int16_t* shorts = weights_ + (b * rows_ + r) * kBlock;
            for (i64 i = 0; i < kBlock; i += 16)
                store_shorts(shorts + i, mul(mul(load(weights + i), load(scales + i)), range));
            weight_scales_[r * parts_ + b] = visible.none() ? 0.0f : top_scale * tops_[r] * (1.0f / kShortMax);
        }
    }

    // acc [rows][head_dim] = acc × factors + weights × values.
    void add_values(float* acc) const {
        for (i64 b = 0; b < parts_; ++b)
            for_whole_block_tiles<2>(rows_, b * kQ8Block, (b + 1) * kQ8Block, [&](i64 row, auto num_rows, i64 column,
                                                                                  auto num_vectors, auto fetch) {
                ProductSums<Q8, num_rows, num_vectors> sums;
                sums.each([&](int r, int v) { sums.at[r][v] = IntSums{}; });
                const std::int16_t* weights = weights_ + (b * rows_ + row) * kBlock;
                for (i64 at = 0; at < cursor_.count(); at += cursor_.segment())
                    sums.add(weights + at, kBlock, cursor_.values<num_vectors>(at, column), dim_ * 2,
                             (cursor_.positions(at) + 1) / 2, fetch);
                sums.each([&](int r, int v) {
                    float* target = acc + (row + r) * dim_ + column + 16 * v;
                    const Floats scale = broadcast(weight_scales_[(row + r) * parts_ + b]);
                    const Floats before = mul(load(target), broadcast(factors_[row + r]));
                    store(target, fmadd(to_floats(sums.at[r][v]), scale, before));
                });
            });
    }

    static float largest_of(const float* scales, i64 count) {
        Ints top = zero_ints();
        for (i64 i = 0; i < count; i += 16)
            top = max_bits(top, select(lanes_between(0, count - i), load(scales + i), broadcast(0.0f)));
        return largest_magnitude(top);
    }

    // Scales of positions without a token become 0.
    void widen_value_scales() {
        const i64 count = cursor_.count();
        for (i64 b = 0; b < parts_; ++b) {
            for (i64 i = 0; i < kBlock; i += 16) {
                Floats scales = broadcast(0.0f);
                if (i < count) {
                    const Segment<Q8>& at = cursor_.now(i);
                    scales = select(lanes_between(0, count - i),
                                    load_halves(at.value_scales + b * at.scale_stride + cursor_.offset(i)), scales);
                }
                store(value_scales_ + b * kBlock + i, scales);
            }
            top_scales_[b] = largest_of(value_scales_ + b * kBlock, kBlock);
        }
    }

    BlockCursor<Q8> cursor_;
    const i64 dim_, rows_, parts_;
    const float softcap_;
    float* scores_;
    float* factors_;
    float* tops_;
    std::int16_t* weights_;  // [head_dim / 32][rows][kBlock]: rows a constant number of bytes apart
    float* weight_scales_;   // [rows][head_dim / 32]
    float* value_scales_;    // [head_dim / 32][kBlock]; top_scales_ has the largest of each 32 dimensions
    float* top_scales_;
};

}  // namespace

// A softmax block over a q8_0 cache. Queries and weights become int16, so all products are integer products with exact
// sums. Each sum is scaled once per 32 dimensions (scores) or 64 positions (values). A query's scale comes from its
// largest number. A block's weights have one scale per 32 dimensions: the largest weight times the largest value scale.
// This reads half the bytes of bf16 and never writes the cache out in a wider type.

#pragma once

#include "softmax_block.h"

namespace {

constexpr float kShortMax = 32767.0f;

// The factor that turns numbers of at most top into int16; 0 if top is below 1e-30.
inline Floats to_short_range(float top) { return broadcast(top >= 1e-30f ? kShortMax / top : 0.0f); }

// Consecutive rows of pairs. The next run continues with the factors after this run's.
struct Run {
    const Q8* pairs;
    i64 steps;
};

// Calls finish(r, v, sums) with a[R][2 × steps of all runs] × pairs[steps][16 V pairs]; no sum may reach 2^31.
template <int R, int V, class F>
void pair_product(const std::int16_t* a, i64 lda, const Run* runs, i64 num_runs, i64 ldb, const F& finish) {
    Ints acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] = zero_ints();
    for (const Run* run = runs; run < runs + num_runs; a += 2 * run->steps, ++run)
        for (i64 k = 0; k < run->steps; ++k) {
            Ints w[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) w[v] = load_pairs(&run->pairs[k * ldb + 32 * v].number);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(acc[r][v], a + r * lda + 2 * k, w[v]);
        }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) finish(r, v, to_floats(acc[r][v]));
}

class Q8Block {  // see FloatBlock
  public:
    using Number = std::int16_t;

    Q8Block(const Engine& engine, const Attention& layer, i64 row, i64 rows, Scratch& scratch)
        : finder_(engine, layer.cache, row, scratch), dim_(engine.shape.head_dim), segment_(engine.segment()),
          rows_(rows), parts_(dim_ / kQ8Block), weights_(scratch.take<std::int16_t>(rows * parts_ * kBlock)),
          weight_scales_(scratch.take<float>(rows * parts_)),
          value_scales_(scratch.take<float>(parts_ * kBlock)), top_scales_(scratch.take<float>(parts_)) {}

    template <class T> float load_query(const T* q, std::int16_t* query) const {
        const float top = largest_magnitude(q, dim_);
        const Floats factor = to_short_range(top);
        for (i64 d = 0; d < dim_; d += 16) store_shorts(query + d, mul(load(q + d), factor));
        return top / kShortMax;
    }

    void score(i64 kv_head, i64 first, i64 end, const std::int16_t* queries, float* scores) {
        count_ = end - first;
        for (i64 at = 0, i = 0; at < count_; at += segment_, ++i) {
            found_[i] = finder_.find(kv_head, first + at, std::min(segment_, count_ - at));
            score_segment(found_[i], queries, scores + at);
            widen_value_scales(found_[i], at);
        }
        for (i64 b = 0; b < parts_; ++b) top_scales_[b] = largest_of(value_scales_ + b * kBlock, kBlock);
    }

    float update_softmax(i64 r, float* scores, i64 from, i64 to, float scale, float& peak, float& sum) {
        float* weights = scores + r * kBlock;
        const SoftmaxUpdate update = ::update_softmax(weights, from, to, scale, peak, sum, weights);
        const float to_one = update.top < 1e-20f ? 0.0f : 1.0f / update.top;
        for (i64 b = 0; b < parts_; ++b) {
            // The scale covers positions below `to` only, so that it does not depend on the tile's other queries.
            const float* scales = value_scales_ + b * kBlock;
            const float top_scale = to == kBlock ? top_scales_[b] : largest_of(scales, to);
            const Floats range = mul(to_short_range(top_scale), broadcast(to_one));
            std::int16_t* shorts = weights_ + (r * parts_ + b) * kBlock;
            for (i64 i = 0; i < kBlock; i += 16)
                store_shorts(shorts + i, mul(mul(load(weights + i), load(scales + i)), range));
            weight_scales_[r * parts_ + b] = top_scale * update.top * (1.0f / kShortMax);
        }
        return update.factor;
    }

    void skip_row(i64 r) {
        std::memset(weights_ + r * parts_ * kBlock, 0, parts_ * kBlock * sizeof(std::int16_t));
        std::memset(weight_scales_ + r * parts_, 0, parts_ * sizeof(float));
    }

    void add_values(float* acc) const {
        const i64 num_runs = (count_ + segment_ - 1) / segment_;
        for (i64 b = 0; b < parts_; ++b)
            for_row_tiles(rows_, [&](i64 row, auto num_rows) {
                constexpr int R = decltype(num_rows)::value;
                constexpr int most = std::min(2, max_vectors(R));
                for_column_tiles<R, most>(b * kQ8Block, (b + 1) * kQ8Block, [&](i64 column, auto num_vectors) {
                    constexpr int V = decltype(num_vectors)::value;
                    Run runs[kBlock / 16];
                    for (i64 i = 0; i < num_runs; ++i)
                        runs[i] = {found_[i].values + column * 2, (std::min(segment_, count_ - i * segment_) + 1) / 2};
                    const auto finish = [&](int r, int v, Floats sums) {
                        float* target = acc + (row + r) * dim_ + column + 16 * v;
                        store(target, fmadd(sums, broadcast(weight_scales_[(row + r) * parts_ + b]), load(target)));
                    };
                    pair_product<R, V>(weights_ + (row * parts_ + b) * kBlock, parts_ * kBlock, runs, num_runs,
                                       dim_ * 2, finish);
                });
            });
    }

  private:
    void score_segment(const Segment<Q8>& segment, const std::int16_t* queries, float* scores) const {
        for_row_tiles(rows_, [&](i64 row, auto num_rows) {
            constexpr int R = decltype(num_rows)::value;
            for_column_tiles<R>(0, segment_, [&](i64 column, auto num_vectors) {
                constexpr int V = decltype(num_vectors)::value;
                for (i64 b = 0; b < parts_; ++b) {
                    const Run run{segment.keys + b * (kQ8Block / 2) * segment.key_stride + column * 2, kQ8Block / 2};
                    const Half* scales = segment.key_scales + b * segment.scale_stride + column;
                    const auto finish = [&](int r, int v, Floats sums) {
                        float* target = scores + (row + r) * kBlock + column + 16 * v;
                        const Floats x = mul(sums, load_halves(scales + 16 * v));
                        store(target, b == 0 ? x : add(load(target), x));
                    };
                    pair_product<R, V>(queries + row * dim_ + b * kQ8Block, dim_, &run, 1, segment.key_stride, finish);
                }
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
    void widen_value_scales(const Segment<Q8>& segment, i64 at) {
        for (i64 b = 0; b < parts_; ++b)
            for (i64 i = 0; i < segment_; i += 16) {
                const Floats scales = load_halves(segment.value_scales + b * segment.scale_stride + i);
                store(value_scales_ + b * kBlock + at + i,
                      select(lanes_between(0, count_ - at - i), scales, broadcast(0.0f)));
            }
        for (i64 i = at + segment_; i < kBlock && at + segment_ >= count_; i += 16)
            for (i64 b = 0; b < parts_; ++b) store(value_scales_ + b * kBlock + i, broadcast(0.0f));
    }

    const SegmentFinder<Q8> finder_;
    const i64 dim_, segment_, rows_, parts_;
    i64 count_ = 0;
    std::int16_t* weights_;  // [rows][head_dim / 32][kBlock]
    float* weight_scales_;   // [rows][head_dim / 32]
    float* value_scales_;    // [head_dim / 32][kBlock]; top_scales_ has the largest of each 32 dimensions
    float* top_scales_;
    Segment<Q8> found_[kBlock / 16];
};

}  // namespace

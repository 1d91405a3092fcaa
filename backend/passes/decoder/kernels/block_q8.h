// A softmax block over a q8_0 cache. Queries and weights become int16 with a scale of their own (of each query and head,
// and of each query, block and 32 dimensions), so that all products are of integers, whose sums are exact; each sum is
// scaled once for 32 dimensions or 64 positions. Reads half the bytes of bf16 and never writes a wide copy of them.

#pragma once

#include "block.h"

namespace {

constexpr float kShortMax = 32767.0f;

// x[0 … n) as int16; returns the scale. What is all smaller than 1e-30 counts as 0; not finite numbers give NaN.
inline float to_shorts(const float* x, i64 n, std::int16_t* shorts) {
    const float top = magnitude(x, n);
    const Floats inverse = all(top >= 1e-30f ? kShortMax / top : 0.0f);
    for (i64 k = 0; k < n; k += 16) store_shorts(shorts + k, mul(load(x + k), inverse));
    return top / kShortMax;
}

// Rows of pairs that follow each other; the next run goes on where the last one's factors ended.
struct Run {
    const Q8* pairs;
    i64 steps;
};

// finish(r, v, sums) with a[R][2 × steps of all runs] × pairs[steps][16 V pairs]; no sum may reach 2^31.
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

class Q8Block {  // as FloatBlock
  public:
    using Number = std::int16_t;

    Q8Block(const Engine& engine, const Attention& layer, i64 row, i64 rows, Scratch& scratch)
        : finder_(engine, layer.cache, row, scratch), dim_(engine.shape.head_dim), segment_(engine.segment()),
          rows_(rows), parts_(dim_ / kQ8Block), weights_(scratch.take<std::int16_t>(rows * parts_ * kBlock)),
          weight_scales_(scratch.take<float>(rows * parts_)) {}

    template <class T> float take_query(const T* q, std::int16_t* query) const {
        float wide[kMaxHeadDim];
        for (i64 d = 0; d < dim_; d += 16) store(wide + d, load(q + d));
        return to_shorts(wide, dim_, query);
    }

    void score(i64 kv_head, i64 first, i64 end, const std::int16_t* queries, float* scores) {
        count_ = end - first;
        for (i64 at = 0, i = 0; at < count_; at += segment_, ++i) {
            found_[i] = finder_.find(kv_head, first + at, std::min(segment_, count_ - at));
            score_segment(found_[i], queries, scores + at);
        }
    }

    float soften(i64 r, float* scores, i64 from, i64 to, float scale, float& peak, float& sum) {
        float* weights = scores + r * kBlock;
        const float factor = ::soften(weights, from, to, scale, peak, sum, weights);
        for (i64 b = 0; b < parts_; ++b) {
            float scaled[kBlock] = {};
            for (i64 at = 0; at < count_; at += 16) {
                const Segment<Q8>& segment = found_[at / segment_];
                const Floats x = mul(load(weights + at),
                                     load_halves(segment.value_scales + b * segment.scale_stride + at % segment_));
                store(scaled + at, select(lanes_between(from - at, to - at), x, all(0.0f)));
            }
            const i64 part = r * parts_ + b;
            weight_scales_[part] = to_shorts(scaled, kBlock, weights_ + part * kBlock);
        }
        return factor;
    }

    void ignore(i64 r) {
        std::memset(weights_ + r * parts_ * kBlock, 0, parts_ * kBlock * sizeof(std::int16_t));
        std::memset(weight_scales_ + r * parts_, 0, parts_ * sizeof(float));
    }

    void mix(float* acc) const {
        const i64 num_runs = (count_ + segment_ - 1) / segment_;
        for (i64 b = 0; b < parts_; ++b)
            by_rows(rows_, [&](i64 row, auto num_rows) {
                constexpr int R = decltype(num_rows)::value;
                by_columns<R, std::min(2, max_vectors(R))>(b * kQ8Block, (b + 1) * kQ8Block, [&](i64 column, auto num_vectors) {
                    constexpr int V = decltype(num_vectors)::value;
                    Run runs[kBlock / 16];
                    for (i64 i = 0; i < num_runs; ++i)
                        runs[i] = {found_[i].values + column * 2, (std::min(segment_, count_ - i * segment_) + 1) / 2};
                    const auto finish = [&](int r, int v, Floats sums) {
                        float* target = acc + (row + r) * dim_ + column + 16 * v;
                        store(target, fmadd(sums, all(weight_scales_[(row + r) * parts_ + b]), load(target)));
                    };
                    pair_product<R, V>(weights_ + (row * parts_ + b) * kBlock, parts_ * kBlock, runs, num_runs, dim_ * 2,
                                       finish);
                });
            });
    }

  private:
    void score_segment(const Segment<Q8>& segment, const std::int16_t* queries, float* scores) const {
        by_rows(rows_, [&](i64 row, auto num_rows) {
            constexpr int R = decltype(num_rows)::value;
            by_columns<R>(0, segment_, [&](i64 column, auto num_vectors) {
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

    const Finder<Q8> finder_;
    const i64 dim_, segment_, rows_, parts_;
    i64 count_ = 0;
    std::int16_t* weights_;  // [rows][head_dim / 32][kBlock]
    float* weight_scales_;   // [rows][head_dim / 32]
    Segment<Q8> found_[kBlock / 16];
};

}  // namespace

// One softmax block of 64 key positions for the queries of one kv head: scores, softmax and the weighted sum of values,
// for a cache of floats. Positions without a token may hold anything, NaN too: they are not read at all, not even to be
// multiplied by 0.

#pragma once

#include "paged_cache.h"

namespace {

// The part of a block within one page, in the micro-kernels' layout.
template <class C> struct Segment {
    const C* keys;             // [head_dim / lane][…][lane], steps of key_stride numbers
    const C* values;           // [positions / lane][head_dim][lane]
    const Half* key_scales;    // used by Q8 only: [head_dim / 32][…], scale_stride apart, as value_scales
    const Half* value_scales;
    i64 key_stride, scale_stride;
};

// One thread's memory for one work item, handed out piece by piece.
class Scratch {
  public:
    explicit Scratch(std::vector<float>& memory) : next_(memory.data()) {}
    template <class T> T* take(i64 count) {
        T* taken = reinterpret_cast<T*>(next_);
        next_ += (count * i64(sizeof(T)) + 63) / 64 * 16;
        return taken;
    }

  private:
    float* next_;
};

// Finds a block's positions in their pages. Pages of another layout are first gathered into the micro-kernels' layout.
template <class C> class SegmentFinder {
  public:
    SegmentFinder(const Engine& engine, void* cache, i64 row, Scratch& scratch)
        : engine_(engine), cache_(cache), pages_(engine.step.page_table + row * engine.step.page_table_width) {
        if (engine.in_place()) return;
        const i64 dim = engine.shape.head_dim;
        keys_ = scratch.take<C>(kBlock * dim);
        values_ = scratch.take<C>(kBlock * dim);
        key_scales_ = scratch.take<Half>(kBlock * (dim / kQ8Block));
        value_scales_ = scratch.take<Half>(kBlock * (dim / kQ8Block));
    }

    // Positions [first, first + count) of one segment.
    Segment<C> find(i64 kv_head, i64 first, i64 count) const {
        const Shape& shape = engine_.shape;
        const i64 dim = shape.head_dim, size = shape.page_size;
        constexpr int lane = kLane<C>;
        if (engine_.in_place()) {
            const HeadPage<C> page(shape, cache_, pages_[first / size], kv_head);
            const i64 offset = first % size;
            return {page.keys + offset * lane, page.values + offset * dim, page.key_scales + offset,
                    page.value_scales + offset, size * lane,           size};
        }
        for (i64 i = 0; i < count; ++i) {
            const HeadPage<C> page(shape, cache_, pages_[(first + i) / size], kv_head);
            const i64 offset = (first + i) % size;
            for (i64 d = 0; d < dim; ++d) {
                keys_[(d / lane * kBlock + i) * lane + d % lane] = page.keys[offset * dim + d];
                values_[(i / lane * dim + d) * lane + i % lane] = page.values[offset * dim + d];
            }
            if constexpr (std::is_same_v<C, Q8>) {
                for (i64 b = 0; b < dim / kQ8Block; ++b) {
                    key_scales_[b * kBlock + i] = page.key_scales[b * size + offset];
                    value_scales_[b * kBlock + i] = page.value_scales[b * size + offset];
                }
            }
        }
        return {keys_, values_, key_scales_, value_scales_, kBlock * lane, kBlock};
    }

  private:
    const Engine& engine_;
    void* cache_;
    const std::int32_t* pages_;
    C* keys_ = nullptr;
    C* values_ = nullptr;
    Half* key_scales_ = nullptr;
    Half* value_scales_ = nullptr;
};

struct SoftmaxUpdate {
    float factor;  // for the sums over earlier blocks
    float top;     // about the largest weight of this block
};

// Adds positions [from, to) of a block to a query's softmax: turns scores into weights, updates peak and sum. The range
// is not empty.
template <class W>
SoftmaxUpdate update_softmax(const float* scores, i64 from, i64 to, float scale, float& peak, float& sum, W* weights) {
    const Floats hidden = broadcast(-std::numeric_limits<float>::infinity());
    Floats scaled[kBlock / 16];
    Floats top = hidden;
    for (i64 v = 0; v < kBlock / 16; ++v) {
        const Floats all_scores = mul(load(scores + v * 16), broadcast(scale));
        scaled[v] = select(lanes_between(from - v * 16, to - v * 16), all_scores, hidden);
        top = max(top, scaled[v]);
    }
    const float block_peak = largest(top), new_peak = std::max(peak, block_peak);
    Floats total = broadcast(0.0f);
    for (i64 v = 0; v < kBlock / 16; ++v) {
        const Floats weight = exp2_negative(sub(scaled[v], broadcast(new_peak)));
        total = add(total, weight);
        store(weights + v * 16, weight);
    }
    const SoftmaxUpdate update{peak == new_peak ? 1.0f : std::exp2(peak - new_peak),
                            block_peak == new_peak ? 1.0f : std::exp2(block_peak - new_peak)};
    sum = sum * update.factor + ::sum(total);
    peak = new_peak;
    return update;
}

// Queries and weights are rounded to C, the type of both factors.
template <class C> class FloatBlock {
  public:
    using Number = C;

    FloatBlock(const Engine& engine, const Attention& layer, i64 row, i64 rows, Scratch& scratch)
        : engine_(engine), finder_(engine, layer.cache, row, scratch), dim_(engine.shape.head_dim),
          segment_(engine.segment()), rows_(rows), weights_(scratch.take<C>(rows * kBlock)),
          values_(scratch.take<C>(2 * kTileRows * dim_)) {}

    // Returns the factor for this query's scores.
    template <class T> float load_query(const T* q, C* query) const {
        for (i64 d = 0; d < dim_; d += 16) store(query + d, load(q + d));
        return 1.0f;
    }

    // Computes scores [rows][kBlock] of positions [first, end).
    void score(i64 kv_head, i64 first, i64 end, const C* queries, float* scores) {
        count_ = end - first;
        for (i64 at = 0, i = 0; at < count_; at += segment_, ++i) {
            found_[i] = finder_.find(kv_head, first + at, std::min(segment_, count_ - at));
            product(engine_, rows_, segment_, queries, dim_, found_[i].keys, found_[i].key_stride, dim_ / kLane<C>,
                    scores + at, kBlock, false);
        }
    }

    // Returns the factor for the sums over earlier blocks.
    float update_softmax(i64 r, float* scores, i64 from, i64 to, float scale, float& peak, float& sum) {
        return ::update_softmax(scores + r * kBlock, from, to, scale, peak, sum, weights_ + r * kBlock).factor;
    }

    void skip_row(i64 r) { std::memset(weights_ + r * kBlock, 0, kBlock * sizeof(C)); }

    // acc [rows][head_dim] += weights × values. Tiles multiply 32 positions of the block at a time, at fixed places.
    void add_values(float* acc) {
        constexpr int lane = kLane<C>;
        const i64 unit = uses_tiles<C>(engine_) ? kTileRows * lane : lane;
        for (i64 at = 0, positions; at < count_; at += positions) {
            positions = std::min(segment_ - at % segment_, count_ - at) / unit * unit;
            const C* values = positions ? values_at(at) : gather_values(at, positions = unit);
            product(engine_, rows_, dim_, weights_ + at, kBlock, values, dim_ * lane, positions / lane, acc, dim_, true);
        }
    }

  private:
    const C* values_at(i64 at) const { return found_[at / segment_].values + at % segment_ * dim_; }

    // Copies positions [at, at + count) of the block, both multiples of the lane; zeros where there is no token.
    const C* gather_values(i64 at, i64 count) {
        constexpr int lane = kLane<C>;
        for (i64 i = 0; i < count; i += lane) {
            C* target = values_ + i * dim_;
            const i64 left = count_ - at - i;
            if (left > 0) std::memcpy(target, values_at(at + i), lane * dim_ * sizeof(C));
            else std::memset(target, 0, lane * dim_ * sizeof(C));
            if (lane == 2 && left == 1)
                for (i64 d = 0; d < dim_; ++d) target[2 * d + 1] = 0;
        }
        return values_;
    }

    const Engine& engine_;
    const SegmentFinder<C> finder_;
    const i64 dim_, segment_, rows_;
    i64 count_ = 0;
    C* weights_;
    C* values_;  // gathered
    Segment<C> found_[kBlock / 16];
};

}  // namespace

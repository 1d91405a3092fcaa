// Where the blocks of 64 key positions lie in the pages of a row.

#pragma once

#include "attention/paged_cache.h"

namespace {

// The part of a block within one page, in the micro-kernels' layout.
template <class C> struct Segment {
    const C* keys;             // [head_dim / lane][…][lane], steps of key_stride numbers
    const C* values;           // [positions / lane][head_dim][lane]
    const Half* key_scales;    // used by Q8 only: [head_dim / 32][…], scale_stride apart, as value_scales
    const Half* value_scales;
    i64 key_stride, scale_stride;

    // The same positions of another head, whose keys begin this many bytes later.
    Segment shifted(i64 bytes) const {
        const auto shift = [&](const auto* p) {
            return reinterpret_cast<decltype(p)>(reinterpret_cast<const char*>(p) + bytes);
        };
        return {shift(keys), shift(values), shift(key_scales), shift(value_scales), key_stride, scale_stride};
    }
};

// One thread's memory for one work item, handed out piece by piece.
class Scratch {
  public:
    explicit Scratch(std::vector<float>& memory) : next_(memory.data()) {}
    // From the first multiple of `alignment` bytes on.
    Scratch(std::vector<float>& memory, std::uintptr_t alignment)
        : next_(reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(memory.data()) + alignment - 1) / alignment *
                                         alignment)) {}
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
    SegmentFinder(const Engine& engine, const Attention& layer, i64 row, Scratch& scratch)
        : engine_(engine), layer_(layer), pages_(engine.step.pages(layer.group, row)) {
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
            const HeadPage<C> page(shape, layer_, pages_[first / size], kv_head);
            const i64 offset = first % size;
            return {page.keys + offset * lane, page.values + offset * dim, page.key_scales + offset,
                    page.value_scales + offset, size * lane,           size};
        }
        for (i64 i = 0; i < count; ++i) {
            const HeadPage<C> page(shape, layer_, pages_[(first + i) / size], kv_head);
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
    const Attention& layer_;
    const std::int32_t* pages_;
    C* keys_ = nullptr;
    C* values_ = nullptr;
    Half* key_scales_ = nullptr;
    Half* value_scales_ = nullptr;
};

// Key positions [first, end) of one kv head: a block, or what there is of it.
struct BlockRange {
    i64 kv_head, first, end;
};

// 16 V lanes of rows that begin at `now`; those at `next` are to be prefetched.
template <class C, int V> struct Columns {
    const C* now[V];
    const C* next[V];
};

// Where the current block lies, and the one after it.
template <class C> class BlockCursor {
  public:
    BlockCursor(const Engine& engine, const Attention& layer, i64 row, Scratch& scratch)
        : finder_(engine, layer, row, scratch), segment_(engine.segment()), dim_(engine.shape.head_dim),
          head_bytes_(head_bytes<C>(engine.shape)), in_place_(engine.in_place()) {
        while (i64(1) << shift_ < segment_) ++shift_;
    }

    // next: null if there is none.
    void move(const BlockRange& block, const BlockRange* next) {
        count_ = block.end - block.first;
        if (!in_place_) {
            now_[0] = next_[0] = finder_.find(block.kv_head, block.first, count_);
            return;
        }
        find(block, now_);
        find(next ? *next : block, next_);  // what is in a cache already is prefetched at little cost
    }

    i64 count() const { return count_; }
    i64 segment() const { return segment_; }
    i64 key_stride() const { return now_[0].key_stride; }
    // The segment that has a position, and the one in its place in the next block.
    const Segment<C>& now(i64 position) const { return now_[position >> shift_]; }
    const Segment<C>& next(i64 position) const { return next_[position >> shift_]; }
    // The position's index in its segment.
    i64 offset(i64 position) const { return position & (segment_ - 1); }
    // The number of positions with a token from the start of a segment on.
    i64 positions(i64 start) const { return std::min(segment_, count_ - start); }

    // The keys of 16 V positions from `position` on, a multiple of 16, from dimension `dim` on. Those of positions after
    // the block's end may be anything.
    template <int V> Columns<C, V> keys(i64 position, i64 dim) const {
        Columns<C, V> columns;
        for (int v = 0; v < V; ++v, position += 16) {
            const i64 at = offset(position) * kLane<C> + dim / kLane<C> * key_stride();
            columns.now[v] = now(position).keys + at;
            columns.next[v] = next(position).keys + at;
        }
        return columns;
    }

    // Dimensions [dim, dim + 16 V) of the values from the start of a segment on.
    template <int V> Columns<C, V> values(i64 start, i64 dim) const {
        Columns<C, V> columns;
        for (int v = 0; v < V; ++v, dim += 16) {
            columns.now[v] = now(start).values + dim * kLane<C>;
            columns.next[v] = next(start).values + dim * kLane<C>;
        }
        return columns;
    }

    const C* values_at(i64 position) const { return now(position).values + offset(position) * dim_; }

  private:
    // Divisions are slow, so pages are found once for all heads. The first segment stands for those after the block's
    // end.
    void find(const BlockRange& block, Segment<C>* segments) {
        Place& place = places_[block.first / kBlock % 2];
        if (place.first != block.first) {
            place.first = block.first;
            for (i64 i = 0; i < kBlock >> shift_; ++i) {
                const i64 at = block.first + (i << shift_);
                place.segments[i] = at < block.end ? finder_.find(0, at, segment_) : place.segments[0];
            }
        }
        for (i64 i = 0; i < kBlock >> shift_; ++i)
            segments[i] = place.segments[i].shifted(block.kv_head * head_bytes_);
    }

    struct Place {
        i64 first = -1;
        Segment<C> segments[kBlock / 16];  // of head 0
    };

    const SegmentFinder<C> finder_;
    const i64 segment_, dim_, head_bytes_;
    const bool in_place_;
    int shift_ = 0;
    i64 count_ = 0;
    Segment<C> now_[kBlock / 16];
    Segment<C> next_[kBlock / 16];
    Place places_[2];
};

}  // namespace

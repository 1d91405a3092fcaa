// The paged KV cache: its layouts, and how a token's key and value are written.
//
// [page][kv head][keys | values], where layers of different sizes share pages with other layers between: decode reads a page head by head, so it reads the page from start to end. Streams of
// 32 KB get twice the memory bandwidth of pieces of 4 KB.
//
//   keys     [head_dim / lane][page_size][lane]
//   values   [page_size / lane][head_dim][lane]
//
// If the page size is not a multiple of 16, both are [page_size][head_dim]. In q8_0 numbers are int8 in pairs, and
// [keys | values] is followed by [key scales | value scales], binary16 [head_dim / 32][page_size] each, for any page
// size.

#pragma once

#include "rows/mtp.h"

namespace {

struct Q8 {  // one number of a q8_0 cache
    std::int8_t number;
};
constexpr int kQ8Block = 32;  // numbers of a head that share a scale
constexpr float kQ8Max = 127.0f;

template <> constexpr int kLane<Q8> = 2;

// The bytes of one kv head in a page.
template <class C> i64 head_bytes(const Shape& shape) {
    const i64 half = shape.page_size * shape.head_dim;
    const i64 scales = std::is_same_v<C, Q8> ? half / kQ8Block : 0;
    return 2 * (half * i64(sizeof(C)) + scales * i64(sizeof(Half)));
}

// The keys and values of one kv head in one page.
template <class C> struct HeadPage {
    C* keys;
    C* values;
    Half* key_scales;  // used by Q8 only, as value_scales
    Half* value_scales;

    HeadPage(const Shape& shape, const Attention& layer, i64 page, i64 kv_head) {
        const i64 half = shape.page_size * shape.head_dim;
        keys = reinterpret_cast<C*>(static_cast<char*>(layer.cache) + page * layer.page_bytes +
                                    kv_head * head_bytes<C>(shape));
        values = keys + half;
        key_scales = reinterpret_cast<Half*>(values + half);
        value_scales = key_scales + half / kQ8Block;
    }
};

// As GGML's q8_0: d = largest |x| / 127; numbers are x / d rounded to the nearest integer, ties away from zero; the
// scale is d rounded to binary16. A block with a value that is not finite gets the scale NaN. dim: a multiple of 32.
template <class T> void quantise(const T* x, i64 dim, Q8* numbers, Half* scales) {
    for (i64 d = 0; d < dim; d += kQ8Block) {
        const float scale = largest_magnitude(x + d, kQ8Block) / kQ8Max;
        const Floats inverse = broadcast(scale >= std::numeric_limits<float>::min() ? 1.0f / scale : 0.0f);
        scales[d / kQ8Block] = to_half(scale);
        for (i64 i = d; i < d + kQ8Block; i += 16) {
            const Floats y = mul(load(x + i), inverse), whole = truncate(y), rest = sub(y, whole);
            store_bytes(&numbers[i].number, add(whole, truncate(add(rest, rest))));
        }
    }
}

// Converts x to the cache's type.
template <class T, class C> void convert(const T* x, i64 dim, C* numbers, Half* scales) {
    if constexpr (std::is_same_v<C, Q8>) {
        quantise(x, dim, numbers, scales);
    } else {
        for (i64 d = 0; d < dim; d += 16) store(numbers + d, load(x + d));
    }
}

template <class T, class C>
void store_token(const Engine& engine, const T* key, const T* value, i64 slot, i64 kv_head, const Attention& layer) {
    const Shape& shape = engine.shape;
    const i64 dim = shape.head_dim, size = shape.page_size, offset = slot % size;
    const HeadPage<C> page(shape, layer, slot / size, kv_head);
    C k[kMaxHeadDim], v[kMaxHeadDim];
    Half k_scales[kMaxHeadDim / kQ8Block], v_scales[kMaxHeadDim / kQ8Block];
    convert(key, dim, k, k_scales);
    convert(value, dim, v, v_scales);
    if constexpr (std::is_same_v<C, Q8>) {
        for (i64 b = 0; b < dim / kQ8Block; ++b) {
            page.key_scales[b * size + offset] = k_scales[b];
            page.value_scales[b * size + offset] = v_scales[b];
        }
    }
    if (!engine.in_place()) {
        std::memcpy(page.keys + offset * dim, k, dim * sizeof(C));
        std::memcpy(page.values + offset * dim, v, dim * sizeof(C));
        return;
    }
    constexpr int lane = kLane<C>;
    for (i64 d = 0; d < dim; d += lane) std::memcpy(page.keys + (d * size + offset * lane), k + d, lane * sizeof(C));
    C* v_start = page.values + (offset / lane) * dim * lane + offset % lane;
    for (i64 d = 0; d < dim; ++d) v_start[d * lane] = v[d];
}

template <class T, class C>
void run_rotate_and_store(Engine& engine, T* qkv, const Attention& layer) {
    const Shape& shape = engine.shape;
    const i64 dim = shape.head_dim, heads = shape.num_heads, kv_heads = shape.num_kv_heads;
    const Step& step = engine.step;
    const i64* slots = step.slot_mapping.data() + layer.group * step.num_tokens;
    engine.split(step.rows(), 2, [&](i64 first, i64 last, int) {
        for (i64 t = first; t < last; ++t) {
            T* row = qkv + t * engine.row_size(layer);
            T* keys = row + (heads + shape.num_gates) * dim;
            const i64 token = step.token(t), turn = step.has_turns ? token : step.positions[token];
            const float* turns = step.rope + turn * shape.rope_width;
            const float* query_turns = layer.query_rope < 0 ? nullptr : turns + layer.query_rope;
            const float* key_turns = layer.key_rope < 0 ? nullptr : turns + layer.key_rope;
            if (layer.q_norm && shape.qk_norm_scope == kWholeProjection) {
                normalise_in_place(shape, row, heads * dim, layer.q_norm);
                normalise_in_place(shape, keys, kv_heads * dim, layer.k_norm);
            }
            for (i64 h = 0; h < heads; ++h)
                norm_and_rotate(shape, row + h * dim, norm_of_head(shape, layer.q_norm, h), query_turns);
            for (i64 h = 0; layer.stores && h < kv_heads; ++h) {
                T *key = keys + h * dim, *value = key + kv_heads * dim;
                norm_and_rotate(shape, key, norm_of_head(shape, layer.k_norm, h), key_turns);
                norm_and_rotate(shape, value, layer.v_norm, nullptr);
                store_token<T, C>(engine, key, value, slots[t], h, layer);
            }
        }
    });
}

}  // namespace

// An encoder's attention: each token over the tokens of its row, in both directions.
//
// A thread packs the keys and values of one head of a row once, then takes tiles of queries. Scores of a tile stay in its
// cache, so the softmax is plain. Each number is summed over positions in order, by itself, and positions that a query does
// not see have the weight 0. So a token's result is the same bits in any batch, and however its row is divided.

#pragma once

#include "step/read_speed.h"

namespace {

constexpr i64 kKeyUnit = 32;          // positions are padded to a multiple: the pairs in a row of a tile
constexpr i64 kTileScores = 8 << 10;  // of a tile of queries: they stay in L1
constexpr i64 kTileQueries = 48;      // at most

struct EncoderAttention {  // mirrored by encoder_structs.py
    const float* bias;  // [heads][2 × bias_reach - 1], of keys bias_reach - 1 before the query and so on; or null
    i64 bias_reach;
    i64 window;       // positions to each side; -1 for all
    i64 rope_offset;  // as in Attention
};

struct FirstAttention {  // mirrored by encoder_structs.py
    const EncoderAttention* attention;
    float* residual;
    const void* attended;  // of the step's first token, as residual
};

inline i64 padded_keys(i64 count) { return (count + kKeyUnit - 1) / kKeyUnit * kKeyUnit; }

// keys [head_dim / lane][padded][lane] and values [padded / lane][head_dim][lane] of `count` positions. Zeros fill up.
template <class T>
void pack_positions(const T* k, const T* v, i64 stride, i64 count, i64 padded, i64 dim, T* keys, T* values) {
    constexpr int lane = kLane<T>;
    const i64 whole = count / kKeyUnit * kKeyUnit;
    if (whole < padded) {
        for (i64 d = 0; d < dim / lane; ++d)
            std::memset(keys + (d * padded + whole) * lane, 0, (padded - whole) * lane * sizeof(T));
        std::memset(values + whole * dim, 0, (padded - whole) * dim * sizeof(T));
    }
    for (i64 p = 0; p < count; ++p) {
        const T* key = k + p * stride;
        for (i64 d = 0; d < dim / lane; ++d) std::memcpy(keys + (d * padded + p) * lane, key + d * lane, lane * sizeof(T));
    }
    for (i64 p = 0; p < count; p += lane) {
        const T *first = v + p * stride, *second = first + stride;
        T* target = values + p * dim;
        if constexpr (lane == 1) {
            std::memcpy(target, first, dim * sizeof(T));
        } else {
            const bool is_pair = p + 1 < count;
            for (i64 d = 0; d < dim; ++d) {
                const std::uint32_t pair = first[d] | std::uint32_t(is_pair ? second[d] : 0) << 16;
                std::memcpy(target + 2 * d, &pair, 4);
            }
        }
    }
}

// Turns a query's scores into weights that are not normalised yet, 0 outside [from, to), and returns their sum.
// scale: of the scores, as exponents of 2. bias: of each position, or null.
template <class W>
float weigh_scores(float* scores, i64 columns, i64 from, i64 to, float scale, const float* bias, W* weights) {
    const Floats factor = broadcast(scale), none = broadcast(-std::numeric_limits<float>::infinity());
    Floats top = none;
    for (i64 at = 0; at < columns; at += 16) {
        Floats x = load(scores + at);
        if (bias) {
            x = fmadd(load(bias + at), broadcast(kLog2E), mul(x, factor));
            store(scores + at, x);
        }
        const bool whole = at >= from && at + 16 <= to;
        top = max(top, whole ? x : select(lanes_between(from - at, to - at), x, none));
    }
    const Floats left = bias ? broadcast(1.0f) : factor, peak = mul(broadcast(largest(top)), left);
    Floats total = broadcast(0.0f);
    for (i64 at = 0; at < columns; at += 16) {
        Floats weight = exp2_negative(fmsub(load(scores + at), left, peak));
        if (at < from || at + 16 > to) weight = select(lanes_between(from - at, to - at), weight, broadcast(0.0f));
        total = add(total, weight);
        store(weights + at, weight);
    }
    return sum(total);
}

// Memory of a work item; grows if need be.
template <class T> struct ItemMemory {
    T *keys, *values, *weights;
    float *scores, *acc, *sums;

    ItemMemory(std::vector<float>& memory, i64 padded, i64 queries, i64 dim) {
        const i64 floats = 2 * padded * dim + queries * (2 * padded + dim + 1) + 6 * 16 + 16;
        if (i64(memory.size()) < floats) memory.resize(floats);
        Scratch scratch(memory, 64);
        keys = scratch.take<T>(padded * dim);
        values = scratch.take<T>(padded * dim);
        scores = scratch.take<float>(queries * padded);
        weights = scratch.take<T>(queries * padded);
        acc = scratch.take<float>(queries * dim);
        sums = scratch.take<float>(queries);
    }
};

template <class T>
void attend_item(Engine& engine, const T* qkv, const EncoderAttention& layer, const EncoderItem& item, T* out,
                 std::vector<float>& memory) {
    const Shape& shape = engine.shape;
    const i64 dim = shape.head_dim, width = shape.num_heads * dim, stride = 3 * width;
    const i64 start = engine.step.row_starts[item.row], length = engine.step.row_starts[item.row + 1] - start;
    const auto first_key = [&](i64 query) { return layer.window < 0 ? 0 : std::max<i64>(0, query - layer.window); };
    const auto end_key = [&](i64 query) { return layer.window < 0 ? length : std::min(length, query + layer.window + 1); };
    const i64 first = first_key(item.first) / kKeyUnit * kKeyUnit, count = end_key(item.last - 1) - first;
    const i64 padded = padded_keys(count);
    const i64 unit = uses_tiles<T>(engine) ? kTileRows : kMaxRows;
    const i64 most = std::max(unit, std::min(kTileQueries, kTileScores / padded) / unit * unit);
    const TileScope scope;
    const ItemMemory<T> own(memory, padded, most, dim);
    const T* row = qkv + start * stride + item.head * dim;
    const T* keys = row + first * stride + width;
    pack_positions(keys, keys + width, stride, count, padded, dim, own.keys, own.values);
    const float scale = kLog2E * shape.score_scale;
    for (i64 query = item.first; query < item.last; query += most) {
        const i64 queries = std::min(most, item.last - query);
        const i64 begin = first_key(query) / kKeyUnit * kKeyUnit - first;
        const i64 columns = padded_keys(end_key(query + queries - 1) - first - begin);
        product(engine, queries, columns, row + query * stride, stride, own.keys + begin * kLane<T>, padded * kLane<T>,
                dim / kLane<T>, own.scores, columns, false);
        for (i64 q = 0; q < queries; ++q) {
            const i64 at = query + q, place = first + begin;
            const float* bias =
                layer.bias ? layer.bias + item.head * (2 * layer.bias_reach - 1) + layer.bias_reach - 1 - at + place : nullptr;
            own.sums[q] = weigh_scores(own.scores + q * columns, columns, first_key(at) - place, end_key(at) - place,
                                       scale, bias, own.weights + q * columns);
        }
        product(engine, queries, dim, own.weights, columns, own.values + begin * dim, dim * kLane<T>, columns / kLane<T>,
                own.acc, dim, false);
        for (i64 q = 0; q < queries; ++q) {
            const Floats norm = broadcast(1.0f / own.sums[q]);
            T* target = out + (start + query + q) * width + item.head * dim;
            for (i64 d = 0; d < dim; d += 16) store(target + d, mul(load(own.acc + q * dim + d), norm));
        }
    }
}

// only_first: of each row its first token only.
template <class T>
void run_encoder_attention(Engine& engine, const T* qkv, const EncoderAttention& layer, T* out, bool only_first = false) {
    const std::vector<EncoderItem>& items = engine.step.encoder_items;
    engine.pool.run(i64(items.size()), [&](i64 chunk, int thread) {
        EncoderItem item = items[chunk];
        if (only_first && item.first > 0) return;
        if (only_first) item.last = 1;
        attend_item(engine, qkv, layer, item, out, engine.scratch[thread]);
    });
}

// Rotates q and k of all tokens.
template <class T> void run_rotate(Engine& engine, T* qkv, const EncoderAttention& layer) {
    const Shape& shape = engine.shape;
    const Step& step = engine.step;
    engine.split(step.num_tokens, std::max<i64>(1, 8192 / shape.hidden), [&](i64 first, i64 last, int) {
        for (i64 t = first; t < last; ++t) {
            const float* cos_sin = step.rope + step.positions[t] * shape.rope_width + layer.rope_offset;
            T* heads = qkv + t * 3 * shape.num_heads * shape.head_dim;
            for (i64 head = 0; head < 2 * shape.num_heads; ++head)
                norm_and_rotate(shape, heads + head * shape.head_dim, nullptr, cos_sin);
        }
    });
}

}  // namespace

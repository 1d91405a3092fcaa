// Operations on single rows: embedding, rotary embedding, soft caps.

#pragma once

#include "rows/norms.h"

namespace {

// The weights of one output, for a linear that is not gated.
template <class T> void read_packed_row(const Linear& linear, i64 output, float* out) {
    if (is_quantized(linear)) return read_quantized_row(linear, part_of(linear, output / kPanel), output, out);
    const T* source = static_cast<const T*>(linear.parts[0].packed) + output / kPanel * linear.inputs * kPanel +
                      output % kPanel * kLane<T>;
    for (i64 k = 0; k < linear.inputs; k += kLane<T>, source += kPanel * kLane<T>)
        for (i64 j = 0; j < kLane<T>; ++j) out[k + j] = to_float(source[j]);
}

// table: rows of T, or a Linear with a row per output.
template <class T> void run_embed(Engine& engine, const void* table, bool is_packed, float* residual) {
    const std::int32_t* ids = engine.step.input_ids;
    const i64 hidden = engine.shape.hidden;
    const Floats scale = broadcast(engine.shape.embedding_scale);
    engine.split(engine.step.num_tokens, 16, [&](i64 first, i64 last, int) {
        for (i64 t = first; t < last; ++t) {
            float* out = residual + t * hidden;
            if (is_packed) {
                read_packed_row<T>(*static_cast<const Linear*>(table), ids[t], out);
                for (i64 k = 0; k < hidden; k += 16) store(out + k, mul(load(out + k, hidden - k), scale), hidden - k);
                continue;
            }
            const T* row = static_cast<const T*>(table) + ids[t] * hidden;
            for (i64 k = 0; k < hidden; k += 16) store(out + k, mul(load(row + k, hidden - k), scale), hidden - k);
        }
    });
}

// A head's norm, or null: a norm over the whole projection was applied before.
inline const float* norm_of_head(const Shape& shape, const float* norm, i64 head) {
    if (!norm || shape.qk_norm_scope == kWholeProjection) return nullptr;
    return shape.qk_norm_scope == kEachHead ? norm + head * shape.head_dim : norm;
}

template <class T> void norm_and_rotate(const Shape& shape, T* head, const float* norm, const float* cos_sin) {
    if (norm) normalise_in_place(shape, head, shape.head_dim, norm);
    if (!cos_sin) return;
    const i64 half = shape.rotary_dim / 2;
    for (i64 d = 0; d < half; d += 16) {
        const i64 count = half - d;
        const Floats cosine = load(cos_sin + d, count), sine = load(cos_sin + half + d, count);
        const Floats x = load(head + d, count), y = load(head + half + d, count);
        store(head + d, fmsub(x, cosine, mul(y, sine)), count);
        store(head + half + d, fmadd(y, cosine, mul(x, sine)), count);
    }
}

// x becomes cap × tanh(x / cap).
inline Floats softcap(Floats x, float cap) { return mul(tanh(mul(x, broadcast(1.0f / cap))), broadcast(cap)); }

// Caps the scores of one query over a block. scale turns scores into exponents of 2. Returns the scale that is left.
inline float cap_scores(float* scores, i64 count, float scale, float cap) {
    for (i64 k = 0; k < count; k += 16)
        store(scores + k, softcap(mul(load(scores + k), broadcast(scale / kLog2E)), cap));
    return kLog2E;
}

inline void run_cap_logits(Engine& engine, float* logits, i64 width) {
    engine.split(engine.step.rows(), std::max<i64>(1, 16384 / width), [&](i64 first, i64 last, int) {
        for (i64 r = first; r < last; ++r)
            for (i64 k = 0; k < width; k += 16) {
                float* target = logits + r * width + k;
                store(target, softcap(load(target, width - k), engine.shape.logits_softcap), width - k);
            }
    });
}

}  // namespace

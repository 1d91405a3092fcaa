// Operations on single rows: embedding, norms, rotary embedding.

#pragma once

#include <cmath>
#include <limits>

#include "int4_linear.h"

namespace {

// The weights of one output, for a linear that is not gated.
template <class T> void read_packed_row(const Engine& engine, const Linear& linear, i64 output, float* out) {
    if (linear.form == kInt8Weight) return read_int8_row(engine, linear, output, out);
    if (linear.form == kInt4Weight) return read_int4_row(linear, output, out);
    const T* source = static_cast<const T*>(linear.packed) + output / kPanel * linear.inputs * kPanel +
                      output % kPanel * kLane<T>;
    for (i64 k = 0; k < linear.inputs; k += kLane<T>, source += kPanel * kLane<T>)
        for (i64 j = 0; j < kLane<T>; ++j) out[k + j] = to_float(source[j]);
}

// table: rows of T, or a Linear with a row per output.
template <class T> void run_embed(Engine& engine, const void* table, bool is_packed, float* residual) {
    const std::int32_t* ids = engine.step.input_ids;
    const i64 hidden = engine.shape.hidden;
    engine.split(engine.step.num_tokens, 16, [&](i64 first, i64 last, int) {
        for (i64 t = first; t < last; ++t) {
            float* out = residual + t * hidden;
            if (is_packed) {
                read_packed_row<T>(engine, *static_cast<const Linear*>(table), ids[t], out);
                continue;
            }
            const T* row = static_cast<const T*>(table) + ids[t] * hidden;
            for (i64 k = 0; k < hidden; k += 16) store(out + k, load(row + k, hidden - k), hidden - k);
        }
    });
}

// 1 / sqrt(mean(x²) + eps)
template <class T> float inverse_rms(const T* x, i64 n, float eps) {
    Floats squares = broadcast(0.0f);
    for (i64 k = 0; k < n; k += 16) {
        const Floats v = load(x + k, n - k);
        squares = fmadd(v, v, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / float(n) + eps);
}

template <class T> void run_rms_norm(Engine& engine, const float* residual, const float* weight, T* out) {
    const i64 hidden = engine.shape.hidden;
    engine.split(engine.step.rows(), std::max<i64>(1, 32768 / hidden), [&](i64 first, i64 last, int) {
        for (i64 r = first; r < last; ++r) {
            const float* x = residual + r * hidden;
            const Floats scale = broadcast(inverse_rms(x, hidden, engine.shape.eps));
            for (i64 k = 0; k < hidden; k += 16)
                store(out + r * hidden + k, mul(mul(load(x + k, hidden - k), scale), load(weight + k, hidden - k)),
                      hidden - k);
        }
    });
}

template <class T> void norm_and_rotate(const Shape& shape, T* head, const float* norm, const float* cos_sin) {
    if (norm) {
        const Floats scale = broadcast(inverse_rms(head, shape.head_dim, shape.eps));
        for (i64 d = 0; d < shape.head_dim; d += 16) store(head + d, mul(mul(load(head + d), scale), load(norm + d)));
    }
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

}  // namespace

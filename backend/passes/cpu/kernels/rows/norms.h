// Norms of rows: y = (x - mean) × scale × weight + bias, where a root mean square norm has neither mean nor bias.

#pragma once

#include <cmath>
#include <limits>

#include "linears/weight_forms.h"

namespace {

struct RowScale {
    float mean, scale;
};

inline float dot(const float* a, const float* b, i64 n) {
    Floats total = broadcast(0.0f);
    for (i64 k = 0; k < n; k += 16) total = fmadd(load(a + k, n - k), load(b + k, n - k), total);
    return sum(total);
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

template <class T> RowScale row_scale(const Shape& shape, const T* x, i64 n) {
    if (shape.norm_kind == kRootMeanSquare) return {0.0f, inverse_rms(x, n, shape.eps)};
    Floats total = broadcast(0.0f), squares = broadcast(0.0f);
    for (i64 k = 0; k < n; k += 16) total = add(total, load(x + k, n - k));
    const float mean = sum(total) / float(n);
    for (i64 k = 0; k < n; k += 16) {
        const Floats v = select(lanes_between(0, n - k), sub(load(x + k, n - k), broadcast(mean)), broadcast(0.0f));
        squares = fmadd(v, v, squares);
    }
    return {mean, 1.0f / std::sqrt(sum(squares) / float(n) + shape.eps)};
}

// Numbers [k, k + 16) of the norm of x. bias: null for a norm without.
template <class T>
Floats normalise(const T* x, i64 k, i64 n, RowScale row, const float* weight, const float* bias) {
    const Floats v = load(x + k, n - k), factor = load(weight + k, n - k), scale = broadcast(row.scale);
    if (!bias) return mul(mul(sub(v, broadcast(row.mean)), scale), factor);
    return fmadd(mul(sub(v, broadcast(row.mean)), scale), factor, load(bias + k, n - k));
}

// The norm of a residual row; the bias of a layer norm follows its weight.
inline const float* bias_of(const Shape& shape, const float* weight) {
    return shape.norm_kind == kLayerNorm ? weight + shape.hidden : nullptr;
}

// Calls body(row) for all rows of the step in parallel.
template <class F> void for_each_row(Engine& engine, const F& body) {
    engine.split(engine.step.rows(), std::max<i64>(1, 32768 / engine.shape.hidden), [&](i64 first, i64 last, int) {
        for (i64 r = first; r < last; ++r) body(r);
    });
}

// weight: null to convert the numbers only.
template <class T> void run_norm(Engine& engine, const float* residual, const float* weight, T* out) {
    const Shape& shape = engine.shape;
    const i64 n = shape.hidden;
    for_each_row(engine, [&](i64 r) {
        const float* x = residual + r * n;
        T* target = out + r * n;
        if (!weight) {
            for (i64 k = 0; k < n; k += 16) store(target + k, load(x + k, n - k), n - k);
            return;
        }
        const RowScale row = row_scale(shape, x, n);
        for (i64 k = 0; k < n; k += 16) store(target + k, normalise(x, k, n, row, weight, bias_of(shape, weight)), n - k);
    });
}

enum AddNorm : i64 { kAddNormOnly = 0, kAddNormAndScale = 1, kStoreNorm = 2 };  // as in native_structs.py

// residual += norm(x). kAddNormAndScale: the sum is multiplied by the number after the weights. kStoreNorm: residual is
// replaced.
inline void run_add_norm(Engine& engine, const float* all, const float* weight, float* residual, i64 form) {
    const Shape& shape = engine.shape;
    const i64 n = shape.hidden;
    const Floats factor = broadcast(form == kAddNormAndScale ? weight[n] : 1.0f);
    for_each_row(engine, [&](i64 r) {
        const float* x = all + r * n;
        float* target = residual + r * n;
        const RowScale row = row_scale(shape, x, n);
        for (i64 k = 0; k < n; k += 16) {
            const Floats before = form == kStoreNorm ? broadcast(0.0f) : load(target + k, n - k);
            const Floats sum = add(before, normalise(x, k, n, row, weight, bias_of(shape, weight)));
            store(target + k, form == kAddNormAndScale ? mul(sum, factor) : sum, n - k);
        }
    });
}

// Of q or k: n numbers, a multiple of 16, without a bias.
template <class T> void normalise_in_place(const Shape& shape, T* x, i64 n, const float* weight) {
    const RowScale row = row_scale(shape, x, n);
    for (i64 k = 0; k < n; k += 16) store(x + k, normalise(x, k, n, row, weight, nullptr));
}

}  // namespace

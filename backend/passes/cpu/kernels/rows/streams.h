// Several residual streams (AltUp, arXiv 2301.13310): a layer predicts all, computes the first, and corrects the others.

#pragma once

#include "rows/layer_inputs.h"

namespace {

constexpr i64 kMaxStreams = 8;

struct Streams {  // mirrored by native_structs.py
    const float* router;       // [streams][hidden], times the norm's weights, divided by hidden
    const float* predictions;  // [streams][streams][streams]
    const float* corrections;  // [streams][streams]
    const float* scale;        // [hidden]: of the first stream, where a layer's input is computed from it
    float* rows;               // [tokens][streams][hidden], also after rows were narrowed
    i64 count;

    float* of_row(const Engine& engine, i64 row) const { return rows + engine.step.token(row) * count * engine.shape.hidden; }
};

// factors[i] = offset + sum over j of weights[i][j] * tanh(router[j] · norm(x)).
inline void route_streams(const Engine& engine, const Streams& streams, const float* x, const float* weights, i64 n,
                          float offset, float* factors) {
    const i64 hidden = engine.shape.hidden;
    const float scale = inverse_rms(x, hidden, engine.shape.eps);
    float modes[kMaxStreams];
    for (i64 j = 0; j < streams.count; ++j) modes[j] = std::tanh(scale * dot(x, streams.router + j * hidden, hidden));
    for (i64 i = 0; i < n; ++i) {
        factors[i] = offset;
        for (i64 j = 0; j < streams.count; ++j) factors[i] += weights[i * streams.count + j] * modes[j];
    }
}

// residual becomes the prediction of the first stream.
inline void run_predict_streams(Engine& engine, const Streams& streams, float* residual) {
    const i64 n = engine.shape.hidden, count = streams.count;
    for_each_row(engine, [&](i64 r) {
        float* rows = streams.of_row(engine, r);
        float factors[kMaxStreams * kMaxStreams];
        route_streams(engine, streams, rows, streams.predictions, count * count, 0.0f, factors);
        for (i64 k = 0; k < n; k += 16) {
            Floats before[kMaxStreams];
            for (i64 j = 0; j < count; ++j) before[j] = load(rows + j * n + k, n - k);
            for (i64 i = 0; i < count; ++i) {
                Floats x = before[i];
                for (i64 j = 0; j < count; ++j) x = fmadd(broadcast(factors[i * count + j]), before[j], x);
                store(rows + i * n + k, x, n - k);
                if (i == 0) store(residual + r * n + k, x, n - k);
            }
        }
    });
}

// residual, a layer's result in place of the first stream, becomes what the layer's input is computed from.
inline void run_correct_streams(Engine& engine, const Streams& streams, float* residual) {
    const i64 n = engine.shape.hidden;
    for_each_row(engine, [&](i64 r) {
        float *rows = streams.of_row(engine, r), *result = residual + r * n;
        float factors[kMaxStreams];
        route_streams(engine, streams, result, streams.corrections, streams.count, 1.0f, factors);
        for (i64 k = 0; k < n; k += 16) {
            const Floats change = sub(load(result + k, n - k), load(rows + k, n - k));
            for (i64 i = 0; i < streams.count; ++i) {
                float* target = rows + i * n + k;
                store(target, fmadd(broadcast(factors[i]), change, load(target, n - k)), n - k);
            }
            store(result + k, mul(load(rows + k, n - k), load(streams.scale + k, n - k)), n - k);
        }
    });
}

// Adds rows to all streams but the first.
inline void run_add_to_streams(Engine& engine, const Streams& streams, const float* added) {
    const i64 n = engine.shape.hidden;
    for_each_row(engine, [&](i64 r) {
        for (i64 i = 1; i < streams.count; ++i) {
            float* target = streams.of_row(engine, r) + i * n;
            for (i64 k = 0; k < n; k += 16)
                store(target + k, add(load(target + k, n - k), load(added + r * n + k, n - k)), n - k);
        }
    });
}

// The factor that gives x the size of the row.
inline float factor_to_size(const float* row, const float* x, i64 n) {
    return std::sqrt(dot(row, row, n) / float(n)) / std::sqrt(std::max(dot(x, x, n) / float(n), 1e-5f));
}

// projected [tokens][streams - 1][hidden]: of the residual, with whose size they begin the streams after the first.
inline void run_begin_streams(Engine& engine, const Streams& streams, const float* projected, const float* residual) {
    const i64 n = engine.shape.hidden, others = streams.count - 1;
    for_each_row(engine, [&](i64 r) {
        const float* first = residual + r * n;
        float* rows = streams.of_row(engine, r);
        std::memcpy(rows, first, n * sizeof(float));
        for (i64 i = 0; i < others; ++i) {
            const float* x = projected + (r * others + i) * n;
            const Floats factor = broadcast(factor_to_size(first, x, n));
            for (i64 k = 0; k < n; k += 16) store(rows + (i + 1) * n + k, mul(load(x + k, n - k), factor), n - k);
        }
    });
}

template <class T> void run_take_stream(Engine& engine, const Streams& streams, i64 stream, T* out) {
    const i64 n = engine.shape.hidden;
    for_each_row(engine, [&](i64 r) {
        const float* x = streams.of_row(engine, r) + stream * n;
        for (i64 k = 0; k < n; k += 16) store(out + r * n + k, load(x + k, n - k), n - k);
    });
}

// residual becomes the mean of the first stream and of the projections of the others, in its size; stream by stream.
inline void run_end_stream(Engine& engine, const Streams& streams, i64 stream, const float* projected, float* residual) {
    const i64 n = engine.shape.hidden;
    const float part = 1.0f / float(streams.count);
    for_each_row(engine, [&](i64 r) {
        const float *first = streams.of_row(engine, r), *x = projected + r * n;
        const Floats factor = broadcast(part * factor_to_size(first, x, n));
        for (i64 k = 0; k < n; k += 16) {
            float* target = residual + r * n + k;
            const Floats before = stream > 1 ? load(target, n - k) : mul(load(first + k, n - k), broadcast(part));
            store(target, fmadd(load(x + k, n - k), factor, before), n - k);
        }
    });
}

// x [rows][gates | ups]: gates are reduced by their mean and `cutoff` standard deviations; what is left is activated.
template <class T> void run_cut_gates(Engine& engine, const float* all, float cutoff, i64 width, T* out) {
    for_each_row(engine, [&](i64 r) {
        const float* x = all + r * 2 * width;
        Floats total = broadcast(0.0f), squares = broadcast(0.0f);
        for (i64 k = 0; k < width; k += 16) total = add(total, load(x + k, width - k));
        const float mean = sum(total) / float(width);
        for (i64 k = 0; k < width; k += 16) {
            const Floats off = sub(load(x + k, width - k), broadcast(mean));
            const Floats own = select(lanes_between(0, width - k), off, broadcast(0.0f));
            squares = fmadd(own, own, squares);
        }
        const Floats least = broadcast(mean + cutoff * std::sqrt(sum(squares) / float(width)));
        for (i64 k = 0; k < width; k += 16) {
            // The order of the maximum's arguments keeps a NaN.
            const Floats gate = max(broadcast(0.0f), sub(load(x + k, width - k), least));
            store(out + r * width + k, gelu_mul(gate, load(x + width + k, width - k)), width - k);
        }
    });
}

}  // namespace

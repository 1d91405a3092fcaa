// The operations of an encoder that the decoder does not have, and a step's operations as data.

#pragma once

#include "encoder/encoder_attention.h"

namespace {

// As in encoder_structs.py.
enum EncoderOperation : i64 {
    kEncoderEmbed, kEncoderNorm, kNormInPlace, kEncoderLinear, kRotate, kEncoderAttention, kActivate,
    kFirstAttention, kSpreadFirst
};
enum Activation : i64 { kIdentity = 0, kExactGelu = 1, kTanhGelu = 2, kReluFloats = 3, kSiluFloats = 4, kTanh = 5, kSigmoid = 6 };

struct EncoderTables {  // mirrored by encoder_structs.py
    const void* words;  // rows of T
    const void* positions;  // or null, as token_types
    const void* token_types;
    i64 first_position;
};

struct EncoderRows {  // mirrored by encoder_structs.py
    const std::int32_t* input_ids;  // [num_tokens], as token_types
    const std::int32_t* token_types;
    const std::int32_t* starts;  // [num_rows + 1]
    const float* rope;
    i64 num_tokens;
    i64 num_rows;
};

// Rows are divided among queries only if there are too few of them to keep the threads busy. The longest come last: the
// pool runs them first.
inline void plan_encoder(Engine& engine, const EncoderRows& rows) {
    Step& step = engine.step;
    step.input_ids = rows.input_ids;
    step.token_types = rows.token_types;
    step.row_starts = rows.starts;
    step.rope = rows.rope;
    step.num_tokens = rows.num_tokens;
    step.is_narrowed = false;
    step.num_narrowed = rows.num_rows;
    step.positions.resize(rows.num_tokens);
    step.encoder_items.clear();
    i64 total = 0;
    for (i64 row = 0; row < rows.num_rows; ++row) {
        const i64 length = rows.starts[row + 1] - rows.starts[row];
        total += length * length * engine.shape.num_heads;
        for (i64 t = 0; t < length; ++t) step.positions[rows.starts[row] + t] = std::int32_t(t);
    }
    const i64 share = std::max<i64>(1, total / (4 * engine.pool.num_threads()));
    for (i64 row = 0; row < rows.num_rows; ++row) {
        const i64 length = rows.starts[row + 1] - rows.starts[row];
        const i64 parts = std::clamp<i64>((length * length + share - 1) / share, 1, (length + 127) / 128);
        for (i64 head = 0; head < engine.shape.num_heads; ++head)
            for (i64 part = 0; part < parts; ++part)
                step.encoder_items.push_back({row, head, length * part / parts, length * (part + 1) / parts});
    }
    const auto cost = [&](const EncoderItem& item) {
        return (item.last - item.first) * (rows.starts[item.row + 1] - rows.starts[item.row]);
    };
    std::stable_sort(step.encoder_items.begin(), step.encoder_items.end(),
                     [&](const EncoderItem& a, const EncoderItem& b) { return cost(a) < cost(b); });
}

template <class T> void run_encoder_embed(Engine& engine, const EncoderTables& tables, float* residual) {
    const Step& step = engine.step;
    const i64 hidden = engine.shape.hidden;
    const auto row_of = [&](const void* table, i64 row) { return static_cast<const T*>(table) + row * hidden; };
    engine.split(step.num_tokens, 16, [&](i64 first, i64 last, int) {
        for (i64 t = first; t < last; ++t) {
            const T* word = row_of(tables.words, step.input_ids[t]);
            const T* position = tables.positions ? row_of(tables.positions, tables.first_position + step.positions[t]) : nullptr;
            const T* type = tables.token_types ? row_of(tables.token_types, step.token_types[t]) : nullptr;
            for (i64 k = 0; k < hidden; k += 16) {
                Floats x = load(word + k, hidden - k);
                if (position) x = add(x, load(position + k, hidden - k));
                if (type) x = add(x, load(type + k, hidden - k));
                store(residual + t * hidden + k, x, hidden - k);
            }
        }
    });
}

// The rows become their norms, in fp32 and in out.
template <class T> void run_norm_in_place(Engine& engine, const float* weight, float* residual, T* out) {
    const Shape& shape = engine.shape;
    const i64 n = shape.hidden;
    for_each_row(engine, [&](i64 r) {
        float* x = residual + r * n;
        const RowScale row = row_scale(shape, x, n);
        for (i64 k = 0; k < n; k += 16) {
            const Floats y = normalise(x, k, n, row, weight, bias_of(shape, weight));
            store(x + k, y, n - k);
            store(out + r * n + k, y, n - k);
        }
    });
}

inline Floats activate(i64 activation, Floats x) {
    const Floats one = broadcast(1.0f);
    switch (activation) {
        case kExactGelu: return gelu_erf_mul(x, one);
        case kTanhGelu: return gelu_mul(x, one);
        case kReluFloats: return max(broadcast(0.0f), x);
        case kSiluFloats: return silu_mul(x, one);
        case kTanh: return tanh(x);
        case kSigmoid: return sigmoid(x);
        default: return x;
    }
}

inline void run_activate(Engine& engine, i64 activation, i64 width, float* x) {
    engine.split(engine.step.rows(), std::max<i64>(1, 16384 / width), [&](i64 first, i64 last, int) {
        for (i64 k = first * width, end = last * width; k < end; k += 16)
            store(x + k, activate(activation, load(x + k, end - k)), end - k);
    });
}

// The attention of each row's first token. From here on a row is that token: its attended numbers and its residual stream
// move to the front.
template <class T>
void run_first_attention(Engine& engine, const T* qkv, const FirstAttention& layer, T* out) {
    run_encoder_attention(engine, qkv, *layer.attention, out, true);
    Step& step = engine.step;
    const i64 hidden = engine.shape.hidden;
    float* residual = layer.residual + (out - static_cast<const T*>(layer.attended));  // both have hidden numbers a token
    for (i64 row = 0; row < step.num_narrowed; ++row) {
        const i64 first = step.row_starts[row];  // not before row, so no row is overwritten before it has moved
        if (first == row) continue;
        std::memcpy(out + row * hidden, out + first * hidden, hidden * sizeof(T));
        std::memcpy(residual + row * hidden, residual + first * hidden, hidden * sizeof(float));
    }
    step.is_narrowed = true;
}

// The residual stream of the first tokens moves back to their places.
inline void run_spread_first(Engine& engine, float* residual) {
    Step& step = engine.step;
    const i64 hidden = engine.shape.hidden;
    for (i64 row = step.num_narrowed - 1; row >= 0; --row)
        std::memmove(residual + step.row_starts[row] * hidden, residual + row * hidden, hidden * sizeof(float));
    step.is_narrowed = false;
}

template <class T> void run_encoder_operation(Engine& engine, const Operation& op) {
    switch (op.kind) {
        case kEncoderEmbed:
            return run_encoder_embed<T>(engine, *static_cast<const EncoderTables*>(op.weights), static_cast<float*>(op.out));
        case kEncoderNorm:
            return run_norm(engine, static_cast<const float*>(op.x), static_cast<const float*>(op.weights),
                            static_cast<T*>(op.out));
        case kNormInPlace:
            return run_norm_in_place(engine, static_cast<const float*>(op.weights),
                                     static_cast<float*>(const_cast<void*>(op.x)), static_cast<T*>(op.out));
        case kEncoderLinear:
            return run_linear(engine, *static_cast<const Linear*>(op.weights), op.form, static_cast<const T*>(op.x), op.out);
        case kRotate:
            return run_rotate(engine, static_cast<T*>(op.out), *static_cast<const EncoderAttention*>(op.weights));
        case kEncoderAttention:
            return run_encoder_attention(engine, static_cast<const T*>(op.x),
                                         *static_cast<const EncoderAttention*>(op.weights), static_cast<T*>(op.out));
        case kFirstAttention:
            return run_first_attention(engine, static_cast<const T*>(op.x), *static_cast<const FirstAttention*>(op.weights),
                                       static_cast<T*>(op.out));
        case kSpreadFirst:
            return run_spread_first(engine, static_cast<float*>(op.out));
        case kActivate:
            return run_activate(engine, op.form, static_cast<const Linear*>(op.weights)->outputs,
                                static_cast<float*>(op.out));
    }
}

inline void run_encoder_operations(Engine& engine, const Operation* operations, i64 count) {
    for (i64 i = 0; i < count; ++i)
        if (engine.shape.act_bf16) run_encoder_operation<bf16>(engine, operations[i]);
        else run_encoder_operation<float>(engine, operations[i]);
}

}  // namespace

// Parts of a step's rows that pass through the operations by themselves.
//
// A thread takes the part that is behind the others and runs its next operation alone. So no thread waits for another
// before the step ends, and one that the system takes off its core delays only the part that it holds. A step with too
// few rows for that is computed as a whole, each operation by all threads. Bits are equal.

#pragma once

#include "encoder/encoder.h"

namespace {

constexpr i64 kLeastPartTokens = 64, kMostPartTokens = 128;  // a longer row is a part of its own

struct EncoderPart {
    Engine engine;  // of one thread: the one that holds the part
    std::vector<std::int32_t> starts;
    i64 first_token = 0;
    i64 num_tokens = 0;
    std::atomic<i64> progress{0};  // 2 × operations that are done, + 1 while a thread holds the part

    explicit EncoderPart(const Shape& shape) : engine(1, 0, shape) {}
};

// Plans the parts of consecutive rows and returns their number; 0 if they would not keep all threads busy.
inline i64 plan_parts(Engine& engine, const EncoderRows& rows) {
    const i64 num_threads = engine.pool.num_threads();
    const i64 wanted = std::clamp(rows.num_tokens / (2 * num_threads), kLeastPartTokens, kMostPartTokens);
    if (num_threads == 1 || rows.num_tokens < num_threads * kLeastPartTokens) return 0;
    i64 num_parts = 0;
    for (i64 row = 0, end = 0; row < rows.num_rows; row = end, ++num_parts) {
        while (end == row || (end < rows.num_rows && rows.starts[end + 1] - rows.starts[row] <= wanted)) ++end;
        const i64 first_token = rows.starts[row], num_tokens = rows.starts[end] - first_token;
        if (num_tokens * num_threads > rows.num_tokens) return 0;  // the others would wait for this one
        if (num_parts == i64(engine.parts.size())) engine.parts.push_back(std::make_shared<EncoderPart>(engine.shape));
        EncoderPart& part = *engine.parts[num_parts];
        part.first_token = first_token;
        part.num_tokens = num_tokens;
        part.progress.store(0, std::memory_order_relaxed);
        part.starts.clear();
        for (i64 k = row; k <= end; ++k) part.starts.push_back(std::int32_t(rows.starts[k] - first_token));
    }
    if (num_parts < num_threads) return 0;
    for (i64 index = 0; index < num_parts; ++index) {
        EncoderPart& part = *engine.parts[index];
        plan_encoder(part.engine, {rows.input_ids + part.first_token, rows.token_types + part.first_token,
                                    part.starts.data(), rows.rope, part.num_tokens, i64(part.starts.size()) - 1});
    }
    return num_parts;
}

// The operation on the rows of x and out from a token on.
template <class T> Operation from_token(const Shape& shape, Operation op, i64 token) {
    i64 x_bytes = 0, out_bytes = shape.hidden * i64(sizeof(T));
    switch (op.kind) {
        case kEncoderEmbed: out_bytes = shape.hidden * i64(sizeof(float)); break;
        case kEncoderNorm:
        case kNormInPlace: x_bytes = shape.hidden * i64(sizeof(float)); break;
        case kEncoderLinear: {
            const Linear& linear = *static_cast<const Linear*>(op.weights);
            x_bytes = linear.inputs * i64(sizeof(T));
            out_bytes = linear.outputs * i64(op.form == kAdd || op.form == kStoreFloat ? sizeof(float) : sizeof(T));
            break;
        }
        case kRotate: out_bytes = 3 * shape.hidden * i64(sizeof(T)); break;
        case kSpreadFirst: out_bytes = shape.hidden * i64(sizeof(float)); break;
        case kFirstAttention:
        case kEncoderAttention: x_bytes = 3 * shape.hidden * i64(sizeof(T)); break;
    }
    op.x = static_cast<const char*>(op.x) + token * x_bytes;
    op.out = static_cast<char*>(op.out) + token * out_bytes;
    return op;
}

// Runs operations of parts until each part that is left is held by a thread.
template <class T> void advance_parts(Engine& engine, i64 num_parts, const Operation* operations, i64 count) {
    for (;;) {
        EncoderPart* last = nullptr;
        i64 least = 2 * count;
        for (i64 index = 0; index < num_parts; ++index) {
            const i64 progress = engine.parts[index]->progress.load(std::memory_order_relaxed);
            if (progress % 2 || progress >= least) continue;
            least = progress;
            last = engine.parts[index].get();
        }
        if (!last) return;
        if (!last->progress.compare_exchange_strong(least, least + 1, std::memory_order_acquire)) continue;
        const Operation& next = operations[least / 2];
        run_encoder_operation<T>(last->engine, from_token<T>(engine.shape, next, last->first_token));
        last->progress.store(least + 2, std::memory_order_release);
    }
}

inline void run_encoder_step(Engine& engine, const EncoderRows& rows, const Operation* operations, i64 count) {
    const i64 num_parts = plan_parts(engine, rows);
    if (!num_parts) {
        plan_encoder(engine, rows);
        return run_encoder_operations(engine, operations, count);
    }
    engine.pool.run(engine.pool.num_threads(), [&](i64, int) {
        if (engine.shape.act_bf16) advance_parts<bf16>(engine, num_parts, operations, count);
        else advance_parts<float>(engine, num_parts, operations, count);
    });
}

}  // namespace

// The head that predicts the token after the next one, from each token's embedding and what the model gave before it.

#pragma once

#include "rows/delta_net.h"

namespace {

struct Mtp {  // mirrored by native_structs.py
    const float* embedding_norm;  // [hidden], as hidden_norm
    const float* hidden_norm;
    float* kept;      // [states][hidden]: what the model gave for a slot's last token
    const void* given;  // [tokens][hidden] what the model gives for the step's tokens; not read if rows have one token
    i64 first_spare;  // as in DeltaNet
};

// out: [tokens][norm of the embedding | norm of what was given for the token before]; zeros before a sequence.
template <class T> void run_mtp_inputs(Engine& engine, const Mtp& head, const float* embeddings, T* out) {
    const Step& step = engine.step;
    const i64 n = engine.shape.hidden;
    const auto write = [&](const auto* x, const float* weight, T* target) {
        const RowScale scale = row_scale(engine.shape, x, n);
        for (i64 k = 0; k < n; k += 16) store(target + k, normalise(x, k, n, scale, weight, nullptr), n - k);
    };
    engine.split(step.num_tokens, 4, [&](i64 begin, i64 end, int) {
        for (i64 t = begin; t < end; ++t) {
            const i64 row = std::upper_bound(step.row_starts, step.row_starts + step.num_rows, t) - step.row_starts - 1;
            T* target = out + 2 * t * n;
            write(embeddings + t * n, head.embedding_norm, target);
            if (t > step.row_starts[row]) write(static_cast<const T*>(head.given) + (t - 1) * n, head.hidden_norm, target + n);
            else if (step.contexts[row]) write(head.kept + step.slots[row] * n, head.hidden_norm, target + n);
            else std::fill_n(target + n, n, T(0.0f));
        }
    });
}

// Keeps what was given for each row's last token, and for those to verify.
template <class T> void run_keep_given(Engine& engine, const Mtp& head, const T* given) {
    const Step& step = engine.step;
    const i64 n = engine.shape.hidden;
    const auto keep = [&](i64 state, i64 token) {
        for (i64 k = 0; k < n; k += 16) store(head.kept + state * n + k, load(given + token * n + k, n - k), n - k);
    };
    for (i64 row = 0; row < step.num_rows; ++row) keep(step.slots[row], step.row_starts[row + 1] - 1);
    for (i64 i = 0; i < step.num_verified; ++i) keep(head.first_spare + i, step.verified[i]);
}

}  // namespace

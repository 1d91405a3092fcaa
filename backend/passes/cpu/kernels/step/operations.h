// A step's operations as data: a list that native_ops.py records once and every step runs in one call.

#pragma once

#include "step/step_plan.h"

namespace {

// As in native_structs.py.
enum OperationKind : i64 {
    kEmbed, kNorm, kLinear, kRotateAndStore, kAttention, kTakeLast, kAddNorm, kCapLogits, kKeepLogits,
    kRoute, kExpertInputs, kExpertOutputs, kWeightRows, kLayerInputs, kWeightByInput, kDeltaNet,
    kBeginStreams, kPredictStreams, kCorrectStreams, kAddToStreams, kTakeStream, kEndStream, kCutGates,
    kMtpInputs, kKeepGiven
};

struct Operation {  // mirrored by native_structs.py
    i64 kind;
    const void* weights;  // a table, a norm's weights, a Linear, Experts, LayerInputs, a DeltaNet, Streams, an Attention
                          // or a number
    const void* x;
    void* out;
    i64 form;  // of a linear its Output; of an embedding whether its table is packed; of logits and gates the width; of
               // a norm that is added its AddNorm; of experts whether they replace; of a layer's input the layer;
               // of streams one of them
};

// How long an operation took, and for how much of that its threads had no work, added over threads.
struct OperationTime {  // mirrored by native_structs.py
    i64 elapsed_ns;
    i64 idle_ns;
};

template <class T> void rotate_and_store(Engine& engine, T* qkv, const Attention& layer) {
    engine.use_heads(layer.has_other_heads);
    switch (engine.shape.cache_form) {
        case kQ8Cache: return run_rotate_and_store<T, Q8>(engine, qkv, layer);
        case kBf16Cache: return run_rotate_and_store<T, bf16>(engine, qkv, layer);
        default: return run_rotate_and_store<T, float>(engine, qkv, layer);
    }
}

template <class T> void attention(Engine& engine, const T* qkv, const Attention& layer, T* out) {
    engine.use_heads(layer.has_other_heads);
    switch (engine.shape.cache_form) {
        case kQ8Cache: return run_attention<T, Q8Block>(engine, qkv, layer, out);
        case kBf16Cache: return run_attention<T, FloatBlock<bf16>>(engine, qkv, layer, out);
        default: return run_attention<T, FloatBlock<float>>(engine, qkv, layer, out);
    }
}

// Copies the residual of the last tokens; from then on the step consists of these rows.
inline void take_last(Engine& engine, const float* residual, float* out) {
    Step& step = engine.step;
    const i64 hidden = engine.shape.hidden;
    for (size_t i = 0; i < step.last_tokens.size(); ++i)
        std::memcpy(out + i64(i) * hidden, residual + step.last_tokens[i] * hidden, hidden * sizeof(float));
    step.num_narrowed = i64(step.last_tokens.size());
    step.is_narrowed = true;
}

// From here on the step consists of the logit rows.
inline void keep_logits(Engine& engine) { engine.step.num_narrowed = engine.step.num_logits; }

template <class T> void run_operation(Engine& engine, const Operation& op) {
    switch (op.kind) {
        case kEmbed:
            return run_embed<T>(engine, op.weights, op.form, static_cast<float*>(op.out));
        case kNorm:
            return run_norm(engine, static_cast<const float*>(op.x), static_cast<const float*>(op.weights),
                            static_cast<T*>(op.out));
        case kAddNorm:
            return run_add_norm(engine, static_cast<const float*>(op.x), static_cast<const float*>(op.weights),
                                static_cast<float*>(op.out), op.form);
        case kCapLogits: return run_cap_logits(engine, static_cast<float*>(op.out), op.form);
        case kLinear:
            return run_linear(engine, *static_cast<const Linear*>(op.weights), op.form, static_cast<const T*>(op.x), op.out);
        case kRotateAndStore:
            return rotate_and_store(engine, static_cast<T*>(op.out), *static_cast<const Attention*>(op.weights));
        case kAttention:
            return attention(engine, static_cast<const T*>(op.x), *static_cast<const Attention*>(op.weights),
                             static_cast<T*>(op.out));
        case kRoute:
            return run_route(engine, *static_cast<const Experts*>(op.weights), static_cast<const T*>(op.x),
                             static_cast<float*>(op.out));
        case kExpertInputs: return run_expert_inputs<T>(engine, *static_cast<const Experts*>(op.weights), op.form);
        case kExpertOutputs:
            return run_expert_outputs<T>(engine, *static_cast<const Experts*>(op.weights), static_cast<float*>(op.out),
                                         op.form);
        case kWeightRows:
            return run_weight_rows(engine, static_cast<const float*>(op.x), op.form, static_cast<T*>(op.out));
        case kDeltaNet:
            return run_delta_net(engine, *static_cast<const DeltaNet*>(op.weights), static_cast<const T*>(op.x),
                                 static_cast<T*>(op.out));
        case kLayerInputs:
            return run_layer_inputs<T>(engine, *static_cast<const LayerInputs*>(op.weights), static_cast<float*>(op.out));
        case kWeightByInput:
            return run_weight_by_input(engine, *static_cast<const LayerInputs*>(op.weights),
                                       static_cast<const float*>(op.x), op.form, static_cast<T*>(op.out));
        case kBeginStreams:
            return run_begin_streams(engine, *static_cast<const Streams*>(op.weights), static_cast<const float*>(op.x),
                                     static_cast<const float*>(op.out));
        case kPredictStreams:
            return run_predict_streams(engine, *static_cast<const Streams*>(op.weights), static_cast<float*>(op.out));
        case kCorrectStreams:
            return run_correct_streams(engine, *static_cast<const Streams*>(op.weights), static_cast<float*>(op.out));
        case kAddToStreams:
            return run_add_to_streams(engine, *static_cast<const Streams*>(op.weights), static_cast<const float*>(op.x));
        case kTakeStream:
            return run_take_stream(engine, *static_cast<const Streams*>(op.weights), op.form, static_cast<T*>(op.out));
        case kEndStream:
            return run_end_stream(engine, *static_cast<const Streams*>(op.weights), op.form,
                                  static_cast<const float*>(op.x), static_cast<float*>(op.out));
        case kCutGates:
            return run_cut_gates(engine, static_cast<const float*>(op.x), *static_cast<const float*>(op.weights), op.form,
                                 static_cast<T*>(op.out));
        case kMtpInputs:
            return run_mtp_inputs<T>(engine, *static_cast<const Mtp*>(op.weights), static_cast<const float*>(op.x),
                                     static_cast<T*>(op.out));
        case kKeepGiven:
            return run_keep_given(engine, *static_cast<const Mtp*>(op.weights), static_cast<const T*>(op.x));
        case kTakeLast: return take_last(engine, static_cast<const float*>(op.x), static_cast<float*>(op.out));
        case kKeepLogits: return keep_logits(engine);
    }
}

// times: one entry for each operation, or null. A step that only scores tokens has no rows left for its last operations.
inline void run_operations(Engine& engine, const Operation* operations, i64 count, OperationTime* times) {
    for (i64 i = 0; i < count && engine.step.rows() > 0; ++i) {
        const i64 started_ns = times ? now_ns() : 0;
        if (times) engine.pool.start_timing();
        if (engine.shape.act_bf16) run_operation<bf16>(engine, operations[i]);
        else run_operation<float>(engine, operations[i]);
        if (!times) continue;
        const i64 elapsed_ns = now_ns() - started_ns;
        times[i] = {elapsed_ns, elapsed_ns * engine.pool.num_threads() - engine.pool.stop_timing()};
    }
}

}  // namespace

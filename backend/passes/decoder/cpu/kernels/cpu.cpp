// The decoder's operations for x86-64 with AVX-512 or AVX2: plain C functions that native_ops.py calls through ctypes.
// One translation unit. Each header includes the one above it:
//
//   vectors.h           SIMD: sixteen numbers at a time, with AVX-512 or AVX2
//   thread_pool.h       the threads
//   engine.h            state shared by the operations
//   products.h          matrix products on vectors
//   tiles.h             matrix products on tiles, with AMX or emulated
//   linear.h            the linear layers
//   row_ops.h           embedding, norms, rotary embedding
//   paged_cache.h       the layout of the paged KV cache
//   softmax_block.h     one softmax block of attention; softmax_block_q8.h the same over a q8_0 cache
//   attention.h         attention
//   step_plan.h         how the threads divide a step's attention

#include "step_plan.h"

namespace {

Engine& as_engine(void* engine) { return *static_cast<Engine*>(engine); }

// Calls body(T{}), where T is the type of activations and weights.
template <class F> void with_activations(const Engine& engine, const F& body) {
    if (engine.shape.act_bf16) body(bf16{});
    else body(float{});
}

}  // namespace

extern "C" {

int ps_abi() { return 3; }

// Asks the system for the tile registers. Returns 0 if products may use them, an errno if it refuses, and -1 if this
// library has no code for them.
int ps_request_tiles() { return request_tiles(); }

void* ps_create(int num_threads, i64 spin_ns, const Shape* shape) {
    Engine* engine = new Engine(num_threads, spin_ns, *shape);
    for (auto& memory : engine->scratch) memory.resize(scratch_floats(*engine));
    return engine;
}

void ps_destroy(void* engine) { delete static_cast<Engine*>(engine); }

void ps_set_cache(void* engine, i64 page_size, i64 cache_form) {
    as_engine(engine).shape.page_size = page_size;
    as_engine(engine).shape.cache_form = cache_form;
}

i64 ps_packed_elements(i64 inputs, i64 outputs, i64 gated) {
    const i64 width = gated ? kPanel / 2 : kPanel;
    return (outputs + width - 1) / width * kPanel * inputs;
}

void ps_pack(void* engine, const void* weight, i64 inputs, i64 outputs, i64 gated, void* packed) {
    Engine& e = as_engine(engine);
    with_activations(e, [&](auto zero) {
        using T = decltype(zero);
        pack_weight(e, static_cast<const T*>(weight), inputs, outputs, gated, static_cast<T*>(packed));
    });
}

void ps_plan(void* engine, const std::int32_t* starts, const std::int32_t* contexts, i64 num_rows,
             const std::int32_t* page_table, i64 table_width, const std::int32_t* logit_rows, i64 num_logits) {
    plan_step(as_engine(engine), starts, contexts, num_rows, page_table, table_width, logit_rows, num_logits);
}

void ps_embed(void* engine, const void* table, i64 packed, const std::int32_t* ids, float* residual) {
    Engine& e = as_engine(engine);
    with_activations(e, [&](auto zero) {
        run_embed(e, static_cast<const decltype(zero)*>(table), packed, ids, residual);
    });
}

void ps_rms_norm(void* engine, const float* residual, const float* weight, i64 rows, void* out) {
    Engine& e = as_engine(engine);
    with_activations(e, [&](auto zero) {
        run_rms_norm(e, residual, weight, rows, static_cast<decltype(zero)*>(out));
    });
}

void ps_linear(void* engine, const Linear* linear, i64 output, const void* x, i64 rows, void* out) {
    Engine& e = as_engine(engine);
    with_activations(e, [&](auto zero) {
        run_linear(e, *linear, output, static_cast<const decltype(zero)*>(x), rows, out);
    });
}

void ps_rotate_and_store(void* engine, void* qkv, const Attention* layer, const float* rope) {
    Engine& e = as_engine(engine);
    with_activations(e, [&](auto zero) {
        using T = decltype(zero);
        T* x = static_cast<T*>(qkv);
        switch (e.shape.cache_form) {
            case kQ8Cache: return run_rotate_and_store<T, Q8>(e, x, *layer, rope);
            case kBf16Cache: return run_rotate_and_store<T, bf16>(e, x, *layer, rope);
            default: return run_rotate_and_store<T, float>(e, x, *layer, rope);
        }
    });
}

void ps_attention(void* engine, const void* qkv, const Attention* layer, i64 last, void* out) {
    Engine& e = as_engine(engine);
    with_activations(e, [&](auto zero) {
        using T = decltype(zero);
        const T* x = static_cast<const T*>(qkv);
        T* y = static_cast<T*>(out);
        switch (e.shape.cache_form) {
            case kQ8Cache: return run_attention<T, Q8Block>(e, x, *layer, last, y);
            case kBf16Cache: return run_attention<T, FloatBlock<bf16>>(e, x, *layer, last, y);
            default: return run_attention<T, FloatBlock<float>>(e, x, *layer, last, y);
        }
    });
}

// Copies the residual of each logit row's last token.
void ps_take_last(void* engine, const float* residual, float* out) {
    Engine& e = as_engine(engine);
    const i64 hidden = e.shape.hidden;
    for (size_t i = 0; i < e.step.last_tokens.size(); ++i)
        std::memcpy(out + i64(i) * hidden, residual + e.step.last_tokens[i] * hidden, hidden * sizeof(float));
}

}  // extern "C"

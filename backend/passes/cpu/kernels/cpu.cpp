// The decoder's operations for x86-64 with AVX-512 or AVX2 and for ARM with NEON: plain C functions that native_ops.py
// calls through ctypes.
// One translation unit. Each header includes the one above it:
//
//   vectors/vectors.h            SIMD: sixteen numbers at a time, with AVX-512, AVX2 or NEON
//   step/thread_pool.h           the threads
//   step/engine.h                state shared by the operations
//   linears/products.h           matrix products on vectors
//   vectors/tiles.h              matrix products on tiles, with AMX or emulated
//   linears/lora.h               adapters of rows
//   linears/linear.h             linear layers with float weights
//   linears/quantized_rows.h     activations in int8
//   linears/weight_codes.h       how values of 2 to 8 bits are stored
//   linears/quantized_weights.h  the layout of quantised weights
//   linears/ggml_blocks.h        GGML's blocks in that layout
//   linears/quantized_linear.h   linear layers with quantised weights
//   linears/weight_forms.h       linear layers with weights of any form
//   rows/norms.h                 norms
//   rows/row_ops.h               embedding, rotary embedding, soft caps
//   rows/experts.h               mixtures of experts
//   rows/layer_inputs.h          inputs of layers
//   rows/delta_net.h             the gated delta rule
//   rows/mtp.h                   the head that predicts the token after the next one
//   attention/paged_cache.h      the layout of the paged KV cache
//   attention/block_cursor.h     where blocks of 64 positions lie in a row's pages
//   attention/block_products.h   the products of a block on vectors
//   attention/softmax_state.h    the running softmax of query rows
//   attention/softmax_block.h    one softmax block of attention; softmax_block_q8.h the same over a q8_0 cache
//   attention/attention.h        attention
//   step/step_plan.h             how the threads divide a step's attention
//   step/operations.h            a step's operations as data
//   rows/scoring.h               log probabilities of known tokens
//   rows/sampling.h              the sampler
//   step/step_queue.h            steps that run one after the other without the interpreter
//   step/read_speed.h            how fast the threads can read memory, for benchmarks
//   encoder/encoder_attention.h  attention of encoders
//   encoder/encoder.h            the other operations of encoders
//   encoder/encoder_parts.h      an encoder's step, divided into parts

#include "encoder/encoder_parts.h"

namespace {

Engine& as_engine(void* engine) { return *static_cast<Engine*>(engine); }

}  // namespace

extern "C" {

int ps_abi() { return 23; }

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

i64 ps_part_bytes(void* engine, const Linear* linear, i64 part) {
    if (is_quantized(*linear)) return quantized_part_bytes(*linear, part);
    return num_panels(*linear) * kPanel * linear->inputs * (as_engine(engine).shape.act_bf16 ? 2 : 4);
}

// Of all parts: each begins where the one before ends.
i64 ps_packed_bytes(void* engine, const Linear* linear) {
    i64 bytes = 0;
    for (i64 part = 0; part < linear->num_parts; ++part) bytes += ps_part_bytes(engine, linear, part);
    return bytes;
}

// The ps_pack functions fill what linear->parts point to.
void ps_pack(void* engine, const Linear* linear, const void* weight) {
    Engine& e = as_engine(engine);
    if (e.shape.act_bf16) pack_weight(e, *linear, static_cast<const bf16*>(weight));
    else pack_weight(e, *linear, static_cast<const float*>(weight));
}

void ps_pack_quantized(void* engine, const Linear* linear, i64 part, const void* values, i64 in_pairs,
                       const float* factors, const std::uint8_t* multipliers) {
    pack_quantized(as_engine(engine), *linear, part, {values, in_pairs, factors, multipliers});
}

// content: the rows of the part in blocks of a type of GGML, by its number there.
void ps_pack_blocks(void* engine, const Linear* linear, i64 part, i64 type, const std::uint8_t* content) {
    pack_blocks(as_engine(engine), *linear, part, type, content);
}

// Call it where the preparation of a step begins: waking a thread takes longer than the first operations.
void ps_wake(void* engine) { as_engine(engine).pool.wake(); }

void ps_plan(void* engine, const StepRows* rows) { plan_step(as_engine(engine), *rows); }

// times: one entry for each operation, or null.
void ps_run(void* engine, const Operation* operations, i64 count, OperationTime* times) {
    run_operations(as_engine(engine), operations, count, times);
}

// Runs the operations, which compute the logits of rows->num_rows tokens, and scores these.
void ps_score(void* engine, const Operation* operations, i64 count, const ScoredRows* rows) {
    score(as_engine(engine), operations, count, *rows);
}

// Samples the tokens of rows of logits, and counts them in their slots' penalties.
void ps_sample(void* engine, const SampledRows* rows) { sample(as_engine(engine), *rows); }

void* ps_open_queue(void* engine) { return new StepQueue(as_engine(engine)); }

void ps_close_queue(void* queue) { delete static_cast<StepQueue*>(queue); }

i64 ps_queue(void* queue, const QueuedWork* work) { return static_cast<StepQueue*>(queue)->put(*work); }

void ps_await(void* queue, i64 number) { static_cast<StepQueue*>(queue)->await(number); }

void ps_skip(void* queue, i64 number) { static_cast<StepQueue*>(queue)->skip(number); }

// Runs a step of an encoder. The operations' arrays have a row for each of its tokens.
void ps_run_encoder_step(void* engine, const EncoderRows* rows, const Operation* operations, i64 count) {
    run_encoder_step(as_engine(engine), *rows, operations, count);
}

// The next operations of `ps_run_encoder` are on rows->num_tokens rows of numbers.
void ps_plan_encoder(void* engine, const EncoderRows* rows) { plan_encoder(as_engine(engine), *rows); }

void ps_run_encoder(void* engine, const Operation* operations, i64 count) {
    run_encoder_operations(as_engine(engine), operations, count);
}

// Returns the sum of the floats. Their number is a multiple of 128.
float ps_read_memory(void* engine, const float* memory, i64 floats) {
    return read_memory(as_engine(engine), memory, floats);
}

}  // extern "C"

// Norms and rotates q in place, norms and rotates k, and writes k and v to the paged cache in its dtype.
//
// A block processes some heads of one token.

#include "rows/rope_heads.cuh"
#include "step/step_rows.cuh"

constexpr int kThreads = 256;

// qkv [T, row_heads, head_dim]: queries first, keys and values last; query_starts [num_rows + 1]; context_lens and slots [num_rows]; a
// slot of -1 is padding; ropes_by_token: their rows are those of tokens, not of positions. The others as in HeadStore.
// Blocks: x tokens, y heads.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    rope_and_store(Act* __restrict__ qkv, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
                   const float* __restrict__ query_rope, const float* __restrict__ key_rope,
                   unsigned char* __restrict__ layer, const int* __restrict__ page_table, const int* __restrict__ query_starts,
                   const int* __restrict__ context_lens, const int* __restrict__ slots, int num_rows, int max_pages,
                   int page_size, int row_heads, int num_heads, int num_kv_heads, int head_dim, int rotary_dim,
                   int head_norm, int ropes_by_token, float eps) {
    const int token = blockIdx.x, row = row_of_token(token, query_starts, num_rows), slot = slots[row];
    if (slot < 0) return;
    const HeadStore store{q_norm, k_norm, query_rope, key_rope, layer, page_table, max_pages, page_size,
                          num_heads, num_kv_heads, head_dim, rotary_dim, head_norm, eps};
    const int lanes = store.lanes(), lane = threadIdx.x % lanes;
    const int head = blockIdx.y * (kThreads / lanes) + threadIdx.x / lanes;
    const bool present = head < store.all_heads() && lane * 8 < head_dim;
    const int position = context_lens[row] + token - query_starts[row];
    const int place = head < num_heads ? head : head + row_heads - store.all_heads();
    Act* const source = qkv + ((long long)(token) * row_heads + place) * head_dim + lane * 8;
    store(source, head, lane, present, slot, position, ropes_by_token ? token : position);
}

constexpr int kWideThreads = 64;

// The same for heads of up to 512 numbers, with RMS norms [head_dim] of q, k and v; key_rope is not read. With
// num_kv_heads 0 only queries. Blocks: x tokens, y heads; a thread has 8 numbers.
extern "C" __global__ void __launch_bounds__(kWideThreads, 8)
    rope_and_store_wide(Act* __restrict__ qkv, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
                        const float* __restrict__ v_norm, const float* __restrict__ rope,
                        unsigned char* __restrict__ layer, const int* __restrict__ page_table,
                        const int* __restrict__ query_starts, const int* __restrict__ context_lens,
                        const int* __restrict__ slots, int num_rows, int max_pages, int page_size, int row_heads,
                        int num_heads, int num_kv_heads, int head_dim, int rotary_dim, float eps) {
    __shared__ __align__(16) float normed[8 * kWideThreads];
    __shared__ float one_per_warp[kMaxWarps];
    const int token = blockIdx.x, head = blockIdx.y, at = 8 * threadIdx.x;
    const int row = row_of_token(token, query_starts, num_rows), slot = slots[row];
    if (slot < 0) return;
    const HeadStore store{q_norm, k_norm, rope, rope, layer, page_table, max_pages, page_size,
                          num_heads, num_kv_heads, head_dim, rotary_dim, kRmsHeadNorm, eps};
    const bool present = at < head_dim, is_value = head >= num_heads + num_kv_heads;
    const int position = context_lens[row] + token - query_starts[row];
    const int place = head < num_heads ? head : head + row_heads - store.all_heads();
    Act* const source = qkv + ((long long)(token) * row_heads + place) * head_dim + at;
    float x[8] = {}, squares = 0.0f;
    if (present) load8(source, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += x[j] * x[j];
    const float scale = 1.0f / sqrtf(reduce_block(squares, one_per_warp, Sum{}) / float(head_dim) + eps);
    if (present) {
        float weights[8];
        load8((head < num_heads ? q_norm : is_value ? v_norm : k_norm) + at, weights);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= scale * weights[j];
        round_to_act(x);
        store8(normed + at, x);
    }
    __syncthreads();
    if (at < rotary_dim && !is_value) {
        const int half = rotary_dim / 2, pair = at < half ? at : at - half;
        const float* const cos_sin = rope + (long long)(position) * rotary_dim;
        float other[8], cosine[8], sine[8];
        load8(normed + (at < half ? at + half : pair), other);
        load8(cos_sin + pair, cosine);
        load8(cos_sin + half + pair, sine);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = x[j] * cosine[j] + (at < half ? -other[j] : other[j]) * sine[j];
        round_to_act(x);
    }
    store.write(x, source, head, threadIdx.x, present, slot, position);
}

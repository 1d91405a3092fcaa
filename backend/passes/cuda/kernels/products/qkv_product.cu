// The product of q, k and v in a step of few rows of one token each: the norm before it, and rotation and cache write
// behind it. Blocks: tiles of outputs. Dynamic shared memory: kRingWords of 16 bytes.

#include "rows/rope_heads.cuh"
#include "products/row_weights.cuh"

// The block that ends last of those with a head's outputs stores the head. tickets [heads]: zeros, and zeros again behind
// the kernel. head_dim: a multiple of kTileOutputs. The others as in multiply_and_gate and rope_and_store.
extern "C" __global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    multiply_and_store(const Act* x, const float* squares, const unsigned char* __restrict__ values,
                       const Scale* __restrict__ scales, const unsigned char* __restrict__ zeros,
                       const Act* __restrict__ bias, Act* qkv, const float* __restrict__ q_norm,
                       const float* __restrict__ k_norm, const float* __restrict__ query_rope,
                       const float* __restrict__ key_rope, unsigned char* layer, const int* page_table,
                       const int* context_lens, const int* slots, unsigned* tickets, int num_rows, int inputs,
                       int num_parts, int max_pages, int page_size, int num_heads, int num_kv_heads, int head_dim,
                       int rotary_dim, int has_norm, int ropes_by_token, float eps, int has_bias, float scale,
                       int blocks) {
    extern __shared__ uint4 ring[];
    __shared__ float factors[kStreamRows];
    __shared__ int row_slots[kStreamRows], row_positions[kStreamRows];
    __shared__ bool is_last;
    const HeadStore store{q_norm, k_norm, query_rope, key_rope, layer, page_table, max_pages, page_size,
                          num_heads, num_kv_heads, head_dim, rotary_dim, has_norm != 0 ? kRmsHeadNorm : kNoHeadNorm, eps};
    const int outputs = store.all_heads() * head_dim, first = blockIdx.x * kTileOutputs, head = first / head_dim;
    const RowLinear linear{values, scales, zeros, bias, outputs, inputs, has_bias, scale, blocks};
    const WeighedRows rows{x, squares, num_parts, eps};
    StreamedWeights weights = linear.weights({first, outputs, 0});
    const float* sums = stream_tile(ring, x, weights, num_rows, inputs, [&] {
        rows.find_factors(factors, num_rows, inputs);
        // The last warp, which has the fewest factors to find: behind the products every load would be waited for.
        const int row = int(threadIdx.x) - (kStreamThreads - kStreamRows);
        if (row < 0 || row >= num_rows) return;
        row_slots[row] = slots[row];
        row_positions[row] = row_slots[row] >= 0 ? context_lens[row] : 0;
    });
    for_each_sum(num_rows, kTileOutputs, [&](int row, int column, bool is_present) {
        if (!is_present) return;
        const int output = first + column;
        qkv[row * outputs + output] = from_float<Act>(linear.finish(sum_of(sums, row, column), factors[row], output));
    });
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = take_ticket(tickets + head) == unsigned(head_dim / kTileOutputs - 1);
        if (is_last) tickets[head] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    for_each_sum(num_rows, store.lanes(), [&](int row, int lane, bool is_present) {
        const int slot = is_present ? row_slots[row] : -1, position = slot >= 0 ? row_positions[row] : 0;
        Act* source = qkv + row * outputs + head * head_dim + lane * 8;
        const int turn = ropes_by_token && slot >= 0 ? row : position;
        store(source, head, lane, slot >= 0 && lane * 8 < head_dim, slot, position, turn);
    });
}

// Writes the embedding of each token of a step to the residual stream.

#include "step/step_tokens.cuh"
#include "common/values.cuh"

constexpr int kThreads = 128;

// table [vocab_size, hidden], input_ids [T], last_tokens [max_slots], residual [T, hidden] fp32. Embeddings are multiplied
// by scale. An id outside the table gives zeros, and so does kFromSlot in a padding row. Blocks: x tokens, y chunks of 8 numbers, one per thread.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
    embed(const Act* __restrict__ table, const int* __restrict__ input_ids, const int* __restrict__ last_tokens,
          const int* __restrict__ query_starts, const int* __restrict__ slots, float* __restrict__ residual,
          int num_rows, int vocab_size, int hidden, float scale) {
    const int column = (blockIdx.y * kThreads + threadIdx.x) * 8;
    if (column >= hidden) return;
    const int token_id = token_to_embed(blockIdx.x, input_ids, last_tokens, query_starts, slots, num_rows);
    if (token_id == kFromEmbeddings) return;
    float x[8] = {};
    if (token_id >= 0 && token_id < vocab_size) load8(table + (long long)(token_id) * hidden + column, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= scale;
    store8(residual + (long long)(blockIdx.x) * hidden + column, x);
}

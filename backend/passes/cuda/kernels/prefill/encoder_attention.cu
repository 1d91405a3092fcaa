// Attention of a step's tokens over all tokens of their row, before and behind them, on the tensor cores:
// prefill_attention.cu without its mask and its cache. Keys and values are those of the step.
//
// grid (heads, query tiles), 128 threads. A tile begins at a multiple of its size, counted from its row's first token. So
// a row's result does not depend on the other rows.
//
// Macros: HEAD_DIM, KV_DTYPE (1: bf16).

#include "prefill/prefill_products.cuh"

using Stream = KvStream<kThreads, kTokens, 3, PackedPlaces>;

// Apply change(score, token - position, token) to each score of tokens from `first` on.
template <class F>
__device__ __forceinline__ void for_each_score(Scores& scores, const int* positions, int first, const F& change) {
    const int lane = int(threadIdx.x & 31), warp_row = int(threadIdx.x / 32 * kWarpRows);
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int position = positions[warp_row + block * 16 + half * 8 + (lane >> 2)];
#pragma unroll
            for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = first + 2 * (lane & 3) + j * 8 + i;
                    change(scores[block][j][2 * half + i], token - position, token);
                }
            }
        }
    }
}

// out [tokens, heads, HEAD_DIM], qkv [tokens, 3, heads, HEAD_DIM], both bf16. row_starts [rows + 1]. tiles [grid.y, 2]: a
// row, and the tile's first token within it. biases [heads, 2 · reach - 1] is added to the scores, by the key's distance
// from -(reach - 1) on; reach 0: it is not read. window: tokens to each side, or -1 for all.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    encoder_attention(void* out, const void* qkv, const int* row_starts, const int* tiles, const float* biases,
                      int reach, int window, float scale) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int* const tile_of_block = tiles + 2 * blockIdx.y;
    const QueryTile<kQueryRows> tile(row_starts, tile_of_block);
    const int length = row_starts[tile_of_block[0] + 1] - tile.first_token;
    const int side = window < 0 ? 1 << 29 : window;
    const int warp_row = int(threadIdx.x / 32 * kWarpRows);
    const bool has_rows = warp_row < tile.num_rows;
    const int warp_first = tile.position(warp_row), warp_last = tile.position(warp_row + kWarpRows - 1);
    const float* bias = biases + (long long)(blockIdx.x) * (2 * reach - 1) + reach - 1;  // of distance 0

    unsigned char* queries = shared;
    int* positions = reinterpret_cast<int*>(shared + kQueryRows * kChunks * 16);
    load_queries(queries, tile, qkv, 3 * int(gridDim.x), KV_DTYPE, int(blockIdx.x), int(threadIdx.x));
    if (threadIdx.x < kQueryRows) positions[threadIdx.x] = tile.position(int(threadIdx.x));
    const int begin = max(0, tile.position(0) - side);
    const int end = min(length, tile.position(kQueryRows - 1) + side + 1);
    Stream stream(shared + kQueryRows * (kChunks * 16 + 4), PackedPlaces(qkv, tile.first_token, begin, end));

    Sums sums;
    PerRow references, totals;
    reset(sums, references, totals);
    const float to_log2 = reach > 0 ? kLog2E : scale * kLog2E;
    for (int first = begin / kTokens * kTokens; first < end; first += kTokens) {
        const int last = first + kTokens - 1;
        const bool sees_some = has_rows && first <= warp_last + side && last >= warp_first - side;
        const bool sees_all = last < length && last <= warp_first + side && first >= warp_last - side;
        Weights weights;
        const unsigned char* keys = stream.next<kKeys>(first);
        if (sees_some) {
            Scores scores;
            score(scores, queries, keys);
            if (reach > 0) {
                for_each_score(scores, positions, first, [&](float& x, int distance, int token) {
                    x = x * scale + (token < length ? bias[distance] : 0.0f);
                });
            }
            if (!sees_all) {
                for_each_score(scores, positions, first, [&](float& x, int distance, int token) {
                    if (token >= length || distance > side || distance < -side) x = -infinity();
                });
            }
            softmax(weights, scores, sums, references, totals, to_log2);
        }
        const unsigned char* values = stream.next<kValues>(first);
        if (sees_some) accumulate(sums, weights, values);
    }
    store_outputs(out, task_of_block(), tile, KV_DTYPE, sums, references, totals, to_log2, nullptr);
}

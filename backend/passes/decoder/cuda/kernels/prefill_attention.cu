// Attention of a step's tokens over the paged keys and values of their sequences, including their own, on the tensor
// cores: 16-bit products, sums and softmax in fp32. After FlashAttention-2 (arXiv 2307.08691).
//
// grid (kv heads, query tiles), 128 threads. A warp has its own 16 or 32 query rows, independent of the other warps. A
// tile of keys that a row may not see leaves every bit of the row's state unchanged. So a row's result depends only on
// its position, its query and the keys and values up to that position, not on its place in a tile, a chunk or a step.
//
// Macros: HEAD_DIM, KV_DTYPE (bf16, or quantised and then multiplied as fp16).

#include "prefill_products.cuh"
#include "prefill_quantised.cuh"

#if KV_DTYPE == 1
using Stream = KvStream<kThreads, kTokens, 3, KvPlaces>;
#else
using Stream = QuantisedKvStream<kThreads, kTokens>;
#endif

// Set the scores of tokens that a row may not see to -infinity. positions: of the query tile's rows; first: position of
// the first token.
__device__ __forceinline__ void mask(Scores& scores, const int* positions, int first, int window) {
    const int lane = int(threadIdx.x & 31), warp_row = int(threadIdx.x / 32 * kWarpRows);
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int position = positions[warp_row + block * 16 + half * 8 + (lane >> 2)] - (first + 2 * (lane & 3));
#pragma unroll
            for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = j * 8 + i;
                    if (column > position || column <= position - window) scores[block][j][2 * half + i] = -infinity();
                }
            }
        }
    }
}

// cap · tanh(scores · scale / cap)
__device__ __forceinline__ void cap_scores(Scores& scores, float scale, float cap) {
    const float to_exponent = 2.0f * kLog2E * scale / cap;
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float power = ex2_approx(scores[block][j][i] * to_exponent);
                scores[block][j][i] = cap - 2.0f * cap * rcp_approx(1.0f + power);
            }
        }
    }
}

// out [tokens, q heads, HEAD_DIM] and qkv [tokens, q heads + 2 · kv heads, HEAD_DIM] have dtype act (0 fp32, 1 bf16, 2
// fp16). layer: start of this layer's pages. tiles [grid.y, 2]: see PrefillStep. sinks [q heads]: a score of each head
// that takes part in the softmax and has no value; -infinity for none. window, soft_cap: 0 for none.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    prefill_attention(void* out, const void* qkv, unsigned char* layer, const int* page_table, const int* context_lens,
                      const int* query_starts, const int* slots, const int* tiles, const float* sinks, int act,
                      int max_pages, int page_bits, int group, int window, float scale, float soft_cap) {
    extern __shared__ __align__(16) unsigned char shared[];
    const PrefillStep step{page_table, context_lens, query_starts,
                           slots,      tiles,        max_pages,
                           group,      window > 0 ? window : 1 << 30};
    if (step.is_padding(int(blockIdx.y))) return;
    const QueryTile<kQueryRows> tile(step, int(blockIdx.y));
    const int warp_row = int(threadIdx.x / 32 * kWarpRows);
    const int warp_first = tile.position(warp_row);
    const int warp_last = warp_row < tile.num_rows ? tile.position(warp_row + kWarpRows - 1) : -1;

    unsigned char* queries = shared;
    int* positions = reinterpret_cast<int*>(shared + kQueryRows * kChunks * 16);
    load_queries(queries, tile, qkv, act);
    if (threadIdx.x < kQueryRows) positions[threadIdx.x] = tile.position(int(threadIdx.x));
    const int begin = max(0, tile.position(0) - step.window + 1);
    const int end = tile.position(kQueryRows - 1) + 1;
    Stream stream(shared + kQueryRows * (kChunks * 16 + 4), KvPlaces(layer, tile.pages, page_bits, begin, end));

    Sums sums = {};
    PerRow references, totals = {};
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) references[block][0] = references[block][1] = -infinity();
    const float to_log2 = soft_cap > 0.0f ? kLog2E : scale * kLog2E;
    for (int first = begin / kTokens * kTokens; first < end; first += kTokens) {
        const int last = first + kTokens - 1;
        const bool sees_some = first <= warp_last && last > warp_first - step.window;
        const bool sees_all = last <= warp_first && first > warp_last - step.window;
        Weights weights;
        const unsigned char* keys = stream.next<kKeys>(first);
        if (sees_some) {
            Scores scores;
            score(scores, queries, keys);
            if (soft_cap > 0.0f) cap_scores(scores, scale, soft_cap);
            if (!sees_all) mask(scores, positions, first, step.window);
            softmax(weights, scores, sums, references, totals, to_log2);
        }
        const unsigned char* values = stream.next<kValues>(first);
        if (sees_some) accumulate(sums, weights, values);
    }
    // Construct the tile again, so that it uses no registers in the loop.
    store_outputs(out, QueryTile<kQueryRows>(step, int(blockIdx.y)), act, sums, references, totals, to_log2, sinks);
}

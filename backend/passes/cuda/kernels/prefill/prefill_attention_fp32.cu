// prefill_attention.cu for an fp32 cache: everything in fp32, without tensor cores, for accuracy.
//
// grid (kv heads, query tiles), 256 threads. A warp has its own 8 or 4 query rows.
//
// Macros: HEAD_DIM, KV_DTYPE (0), SEES_AHEAD.

#include "prefill/prefill_products_fp32.cuh"

using Stream = KvStream<kThreads, kTokens, 2, KvPlaces>;

// Arguments as of prefill_attention.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    prefill_attention_fp32(void* out, const void* qkv, unsigned char* layer, const int* page_table,
                           const int* context_lens, const int* query_starts, const int* slots, const int* tiles,
                           const float* sinks, const int* visible_ends, int act, int row_heads, int max_pages,
                           int page_bits, int group, int window, float scale, float soft_cap) {
    extern __shared__ __align__(16) unsigned char shared[];
    const PrefillStep step{page_table, context_lens, query_starts,
                           slots,      tiles,        max_pages,
                           group,      window > 0 ? window : 1 << 30, visible_ends};
    if (step.is_padding(int(blockIdx.y))) return;
    const QueryTile<kQueryRows> tile(step, int(blockIdx.y));
    const int lane = int(threadIdx.x & 31), warp_row = int(threadIdx.x / 32 * kWarpRows);
    int positions[kWarpRows], last_seen[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
        positions[r] = tile.position(warp_row + r);
        last_seen[r] = tile.last_seen(warp_row + r);
    }
    const int warp_first = positions[0], warp_last = warp_row < tile.num_rows ? last_seen[kWarpRows - 1] : -1;

    float* queries = reinterpret_cast<float*>(shared);
    load_queries(queries, tile, qkv, row_heads, act);
    const int begin = max(0, tile.position(0) - step.window + 1);
    const int end = tile.last_seen(kQueryRows - 1) + 1;
    Stream stream(shared + kQueryRows * HEAD_DIM * 4, KvPlaces(layer, task_of_block(), tile.pages, page_bits, begin, end));

    float sums[kWarpRows][kLaneValues] = {}, totals[kWarpRows] = {}, largest[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) largest[r] = -infinity();
    for (int first = begin / kTokens * kTokens; first < end; first += kTokens) {
        const bool sees_some = first <= warp_last && first + kTokens - 1 > warp_first - step.window;
        float scores[kWarpRows];
        const unsigned char* keys = stream.next<kKeys>(first);
        if (sees_some) {
            score(scores, queries + warp_row * HEAD_DIM, keys);
#pragma unroll
            for (int r = 0; r < kWarpRows; ++r) {
                float x = scores[r] * scale;
                if (soft_cap > 0.0f) x = soft_cap * tanhf(x / soft_cap);
                const int token = first + lane;
                if (token > last_seen[r] || token <= positions[r] - step.window) x = -infinity();
                scores[r] = weigh(x, largest[r], totals[r], sums[r]);
            }
        }
        const unsigned char* values = stream.next<kValues>(first);
        if (sees_some) accumulate(sums, scores, values);
    }
    store_outputs(out, tile, act, sums, largest, totals, sinks);
}

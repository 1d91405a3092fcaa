// Attention of a step's tokens over the paged keys and values of their sequences, including their own, on the tensor
// cores: 16-bit products, sums and softmax in fp32. After FlashAttention-2 (arXiv 2307.08691).
//
// grid (kv heads, query tiles), 128 threads. A warp has its own 16 or 32 query rows, independent of the other warps. A
// tile of keys that a row may not see leaves every bit of the row's state unchanged. So a row's result depends only on
// its position, its query and the keys and values up to that position, not on its place in a tile, a chunk or a step.
//
// Macros: HEAD_DIM, KV_DTYPE (bf16, or quantised and then multiplied as fp16), SEES_AHEAD.

#include "prefill/prefill_masks.cuh"
#include "prefill/prefill_quantised.cuh"
#include "prefill/prefill_segments.cuh"

#if KV_DTYPE == 1
using Stream = KvStream<kThreads, kTokens, 3, KvPlaces>;
#else
using Stream = QuantisedKvStream<kThreads, kTokens>;
#endif

// out [tokens, q heads, HEAD_DIM] and qkv [tokens, row_heads, HEAD_DIM], of which q heads come first, have dtype act (0 fp32, 1 bf16, 2
// fp16). layer: start of this layer's pages. tiles [grid.y, 4]: see PrefillStep; then -1 if the block goes through all
// segments, or the first position of its only one, and this segment's slot; a tile's slots follow each other. sinks [q
// heads]: a score of each head that takes part in the softmax and has no value; -infinity for none. window, soft_cap: 0
// for none. visible_ends: see PrefillStep. merged_sums, merged_peaks: SegmentResults of rows [tokens, q heads]; part_sums, part_peaks: of rows [slots,
// kv heads, kQueryRows]; tickets [slots, kv heads], 0 before and after. They are not accessed with a window, or if all
// positions are in the first segment.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    prefill_attention(void* out, const void* qkv, unsigned char* layer, const int* page_table, const int* context_lens,
                      const int* query_starts, const int* slots, const int* tiles, const float* sinks,
                      float* merged_sums, float2* merged_peaks, float* part_sums, float2* part_peaks, unsigned* tickets,
                      const int* visible_ends, int act, int row_heads, int max_pages, int page_bits, int group, int window,
                      float scale, float soft_cap) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ int is_last;
    const PrefillStep step{page_table, context_lens, query_starts,
                           slots,      tiles,        max_pages,
                           group,      window > 0 ? window : 1 << 30, visible_ends};
    if (step.is_padding(int(blockIdx.y))) return;
    const QueryTile<kQueryRows> tile(step, int(blockIdx.y));
    const int warp_row = int(threadIdx.x / 32 * kWarpRows);
    const int warp_first = tile.position(warp_row);
    const int warp_last = warp_row < tile.num_rows ? tile.position(warp_row + kWarpRows - 1) : -1;
    // The last positions that all and any of the rows see.
    const int all_see = SEES_AHEAD ? tile.last_seen(warp_row) : warp_first;
    const int one_sees = SEES_AHEAD && warp_last >= 0 ? tile.last_seen(warp_row + kWarpRows - 1) : warp_last;

    unsigned char* queries = shared;
    int* positions = reinterpret_cast<int*>(shared + kQueryRows * kChunks * 16);
    load_queries(queries, tile, qkv, row_heads, act, int(blockIdx.x), int(threadIdx.x));
    if (threadIdx.x < kQueryRows) {
        positions[threadIdx.x] = tile.position(int(threadIdx.x));
        if (SEES_AHEAD) positions[kQueryRows + threadIdx.x] = tile.last_seen(int(threadIdx.x));
    }
    // The tiles are those of a layer without a window.
    if (window > 0 && tiles[4 * blockIdx.y + 2] > 0) return;
    const Task task = task_of_block();
    const KeyRange range(step, task.tile, tile, window);
    Stream stream(shared + kQueryRows * (kChunks * 16 + (SEES_AHEAD ? 8 : 4)),
                  KvPlaces(layer, task, tile.pages, page_bits, range.begin, range.end));

    Sums sums;
    PerRow references, totals;
    reset(sums, references, totals);
    const float to_log2 = soft_cap > 0.0f ? kLog2E : scale * kLog2E;
    for (int first = range.begin / kTokens * kTokens; first < range.end;) {
        const int stop = range.stop(first, window);
        for (; first < stop; first += kTokens) {
            const int last = first + kTokens - 1;
            const bool sees_some = first <= one_sees && last > warp_first - step.window;
            const bool sees_all = last <= all_see && first > warp_last - step.window;
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
        if (stop == range.end) break;
        const OutputRows rows(step, task);
        SegmentResults{merged_sums, merged_peaks}.add(sums, references, totals, rows.tile.num_rows,
                                                      stop > kShortestSegment, to_log2, rows);
        reset(sums, references, totals);
    }
    const SegmentWorkspace workspace{{merged_sums, merged_peaks}, {part_sums, part_peaks}, tickets};
    finish_task(out, step, task, workspace, range, window, act, sums, references, totals, to_log2, sinks, &is_last);
}

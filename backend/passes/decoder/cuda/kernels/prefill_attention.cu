// Attention of a step's tokens over the paged keys and values of their sequences, including their own, on the tensor
// cores: 16-bit products, sums and softmax in fp32. After FlashAttention-2 (arXiv 2307.08691).
//
// grid (kv heads, query tiles), 128 threads. A warp has its own 16 or 32 query rows, independent of the other warps. A
// tile of keys that a row may not see leaves every bit of the row's state unchanged. So a row's result depends only on
// its position, its query and the keys and values up to that position, not on its place in a tile, a chunk or a step.
//
// Macros: HEAD_DIM, KV_DTYPE (bf16, or quantised and then multiplied as fp16).

#include "prefill_quantised.cuh"
#include "prefill_segments.cuh"

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

// Where the results of a tile's rows are in memory: [tokens, q heads], or a row for each of the tile's.
struct OutputRows {
    QueryTile<kQueryRows> tile;

    __device__ __forceinline__ explicit OutputRows(const QueryTile<kQueryRows>& tile) : tile(tile) {}
    __device__ __forceinline__ long long operator()(int row) const {
        return tile.head(row, tile.group * int(gridDim.x), int(blockIdx.x) * tile.group);
    }
};
struct PartRows {
    long long first;

    __device__ __forceinline__ long long operator()(int row) const { return first + row; }
};

// out [tokens, q heads, HEAD_DIM] and qkv [tokens, q heads + 2 · kv heads, HEAD_DIM] have dtype act (0 fp32, 1 bf16, 2
// fp16). layer: start of this layer's pages. tiles [grid.y, 4]: see PrefillStep; then -1 if the block goes through all
// segments, or the first position of its only one, and this segment's slot; a tile's slots follow each other. sinks [q
// heads]: a score of each head that takes part in the softmax and has no value; -infinity for none. window, soft_cap: 0
// for none. merged_sums, merged_peaks: SegmentResults of rows [tokens, q heads]; part_sums, part_peaks: of rows [slots,
// kv heads, kQueryRows]; tickets [slots, kv heads], 0 before and after. They are not accessed with a window, or if all
// positions are in the first segment.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    prefill_attention(void* out, const void* qkv, unsigned char* layer, const int* page_table, const int* context_lens,
                      const int* query_starts, const int* slots, const int* tiles, const float* sinks,
                      float* merged_sums, float2* merged_peaks, float* part_sums, float2* part_peaks, unsigned* tickets,
                      int act, int max_pages, int page_bits, int group, int window, float scale, float soft_cap) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ int is_last;
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
    int part = tiles[4 * blockIdx.y + 2];
    if (window > 0) {  // the tiles are those of a layer without a window
        if (part > 0) return;
        part = -1;
    }
    const int begin = part >= 0 ? part : max(0, tile.position(0) - step.window + 1);
    const int last_end = tile.position(kQueryRows - 1) + 1;
    const int end = part >= 0 ? min(last_end, segment_end(part)) : last_end;
    Stream stream(shared + kQueryRows * (kChunks * 16 + 4), KvPlaces(layer, tile.pages, page_bits, begin, end));

    Sums sums;
    PerRow references, totals;
    reset(sums, references, totals);
    const float to_log2 = soft_cap > 0.0f ? kLog2E : scale * kLog2E;
    for (int first = begin / kTokens * kTokens; first < end;) {
        // A block that has one segment ends with it.
        const int stop = window > 0 ? end : min(end, segment_end(first));
        for (; first < stop; first += kTokens) {
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
        if (stop == end) break;
        const OutputRows rows(QueryTile<kQueryRows>(step, int(blockIdx.y)));
        SegmentResults{merged_sums, merged_peaks}.add(sums, references, totals, rows.tile.num_rows,
                                                      stop > kShortestSegment, to_log2, rows);
        reset(sums, references, totals);
    }
    // Construct the tile again, so that it uses no registers in the loop.
    const OutputRows rows(QueryTile<kQueryRows>(step, int(blockIdx.y)));
    const QueryTile<kQueryRows>& own = rows.tile;
    if (part < 0 && (window > 0 || end <= kShortestSegment)) {
        store_outputs(out, own, act, sums, references, totals, to_log2, sinks);
    } else if (part < 0) {
        const SegmentResults merged{merged_sums, merged_peaks};
        merged.add(sums, references, totals, own.num_rows, true, to_log2, rows);
        __syncthreads();
        finish_segments(out, merged, own, rows, 0, 1, act, to_log2, sinks);
    } else {
        const SegmentResults parts{part_sums, part_peaks};
        const long long stride = (long long)(gridDim.x) * kQueryRows;
        const int slot = tiles[4 * blockIdx.y + 3], first_slot = slot - segment_number(part);
        const PartRows own_rows{slot * stride + blockIdx.x * kQueryRows};
        const PartRows first_rows{first_slot * stride + blockIdx.x * kQueryRows};
        parts.add(sums, references, totals, own.num_rows, false, to_log2, own_rows);
        const int num_segments = segment_number(own.position(kQueryRows - 1)) + 1;
        unsigned* ticket = tickets + first_slot * gridDim.x + blockIdx.x;
        __syncthreads();
        if (threadIdx.x == 0) is_last = take_ticket(ticket) + 1 == unsigned(num_segments);
        __syncthreads();
        if (!is_last) return;
        finish_segments(out, parts, own, first_rows, stride, num_segments, act, to_log2, sinks);
        if (threadIdx.x == 0) *ticket = 0;
    }
}

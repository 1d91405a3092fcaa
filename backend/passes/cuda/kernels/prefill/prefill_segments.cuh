// Prefill attention over a long context, in segments that begin at fixed positions. A row's softmax begins anew in each
// segment, and the segments' results are merged in order. One block may go through all segments of a query tile, with
// the merged results so far in memory, or there may be a block for each: the arithmetic is the same, so a row's bits are
// too.
//
// Without a window only: a window is short.

#pragma once

#include "prefill/prefill_products.cuh"

constexpr int kShortestSegment = 2048;  // tokens

// Segments have 2,048 tokens up to position 16,384, and a quarter of the position's power of two from there on.
__device__ __forceinline__ int segment_bits(int position) { return max(11, 29 - __clz(position | 1)); }

__device__ __forceinline__ int segment_end(int position) {
    const int bits = segment_bits(position);
    return ((position >> bits) + 1) << bits;
}

__device__ __forceinline__ int segment_number(int position) {
    const int bits = segment_bits(position);
    return (position >> bits) + 4 * (bits - 11);
}

// Merges the results of neighbouring segments: numbers relative to 2^(reference · to_log2).
struct SegmentMerge {
    float reference;
    float older_factor, newer_factor;

    __device__ __forceinline__ SegmentMerge(float older, float newer, float to_log2) : reference(fmaxf(older, newer)) {
        const float base = reference == -infinity() ? 0.0f : reference;  // -infinity: no token seen in either
        older_factor = ex2_approx((older - base) * to_log2);
        newer_factor = ex2_approx((newer - base) * to_log2);
    }
    __device__ __forceinline__ float operator()(float older, float newer) const {
        return __fmaf_rn(older, older_factor, __fmul_rn(newer, newer_factor));
    }
};

// Unnormalised results of query rows in memory.
struct SegmentResults {
    float* sums;    // [rows, HEAD_DIM]
    float2* peaks;  // [rows]: reference, total

    // Merge a segment's results into those of earlier ones in memory, if there are any. place maps rows of the tile to
    // rows of the memory. All threads of the block call.
    template <class P>
    __device__ __forceinline__ void add(const Sums& newer, const PerRow& references, const PerRow& totals, int num_rows,
                                        bool has_older, float to_log2, const P& place) const {
        const int lane = int(threadIdx.x & 31), warp_row = int(threadIdx.x / 32 * kWarpRows), column = 2 * (lane & 3);
#pragma unroll
        for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp_row + block * 16 + half * 8 + (lane >> 2);
                const bool is_first_lane = row < num_rows && column == 0;
                const long long at = place(min(row, num_rows - 1));
                float2 older = make_float2(-infinity(), 0.0f);
                if (has_older && is_first_lane) older = peaks[at];
                const float total = reduce_lanes(totals[block][half], 4, Sum{});
                const SegmentMerge merge(__shfl_sync(kWholeWarp, older.x, lane & 28), references[block][half], to_log2);
                if (is_first_lane) peaks[at] = make_float2(merge.reference, merge(older.y, total));
                if (row >= num_rows) continue;
                float2* pair = reinterpret_cast<float2*>(sums + at * HEAD_DIM + column);
#pragma unroll
                for (int c = 0; c < kChunks; ++c) {
                    const float2 x = has_older ? pair[4 * c] : make_float2(0.0f, 0.0f);
                    pair[4 * c] = make_float2(merge(x.x, newer[block][c][2 * half]),
                                              merge(x.y, newer[block][c][2 * half + 1]));
                }
            }
        }
    }
};

// Merge the results of a tile's segments and store the outputs. The first segment's are in rows place(row) of
// `results`, the others' `stride` rows further each. A warp has every fourth row.
template <class P>
__device__ __forceinline__ void finish_segments(void* out, const Task& task, const SegmentResults& results,
                                                const QueryTile<kQueryRows>& tile, const P& place, long long stride,
                                                int num_segments, int act, float to_log2, const float* sinks) {
    const int heads_per_token = tile.group * task.num_kv_heads, first_head = task.kv_head * tile.group;
    for (int row = int(threadIdx.x / 32); row < tile.num_rows; row += kThreads / 32) {
        const long long first = place(row);
        const float sink = sinks[first_head + tile.head_of_group(row)];
        for (int column = 4 * int(threadIdx.x & 31); column < HEAD_DIM; column += 128) {
            const float* from = results.sums + first * HEAD_DIM + column;
            float2 peak = make_float2(-infinity(), 0.0f);
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
            for (int segment = 0; segment < num_segments; ++segment) {
                const float2 newer = results.peaks[first + segment * stride];
                const float4 x = *reinterpret_cast<const float4*>(from + segment * stride * HEAD_DIM);
                const SegmentMerge merge(peak.x, newer.x, to_log2);
                peak = make_float2(merge.reference, merge(peak.y, newer.y));
                sum = make_float4(merge(sum.x, x.x), merge(sum.y, x.y), merge(sum.z, x.z), merge(sum.w, x.w));
            }
            const float factor = 1.0f / sum_with_sink(peak.x * to_log2, peak.y, sink);
            const float4 y = make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
            const long long target = tile.head(row, heads_per_token, first_head) * HEAD_DIM + column;
            store_pair(out, target, act, y.x, y.y);
            store_pair(out, target + 2, act, y.z, y.w);
        }
    }
}

// Where the results of a tile's rows are in memory: [tokens, q heads], or a row for each of the tile's.
struct OutputRows {
    Task task;
    QueryTile<kQueryRows> tile;

    __device__ __forceinline__ OutputRows(const PrefillStep& step, const Task& task)
        : task(task), tile(step, task.tile) {}
    __device__ __forceinline__ long long operator()(int row) const {
        return tile.head(row, tile.group * task.num_kv_heads, task.kv_head * tile.group);
    }
};
struct PartRows {
    long long first;

    __device__ __forceinline__ long long operator()(int row) const { return first + row; }
};

// Memory for the results of segments; see the kernels.
struct SegmentWorkspace {
    SegmentResults merged, parts;
    unsigned* tickets;
};

// Which keys a task goes through: those of one segment, or all from `begin` to `end`.
struct KeyRange {
    int part;  // the segment's first position; -1: all
    int begin, end;

    __device__ __forceinline__ KeyRange(const PrefillStep& step, int number, const QueryTile<kQueryRows>& tile,
                                        int window)
        : part(window > 0 ? -1 : step.tiles[4 * number + 2]) {
        begin = part >= 0 ? part : max(0, tile.position(0) - step.window + 1);
        const int last_end = tile.last_seen(kQueryRows - 1) + 1;
        end = part >= 0 ? min(last_end, segment_end(part)) : last_end;
    }

    // The end of the segment that contains `first`. A task that has one segment ends with it.
    __device__ __forceinline__ int stop(int first, int window) const {
        return window > 0 ? end : min(end, segment_end(first));
    }
};

// Store the outputs of a task's rows, or its segment's results; the last task of a tile's segments merges them all.
// All kThreads threads call. is_last: in shared memory.
__device__ __forceinline__ void finish_task(void* out, const PrefillStep& step, const Task& task,
                                            const SegmentWorkspace& workspace, const KeyRange& range, int window,
                                            int act, const Sums& sums, const PerRow& references, const PerRow& totals,
                                            float to_log2, const float* sinks, int* is_last) {
    // Construct the tile again, so that it uses no registers in the loop.
    const OutputRows rows(step, task);
    const QueryTile<kQueryRows>& own = rows.tile;
    if (range.part < 0 && (window > 0 || range.end <= kShortestSegment)) {
        store_outputs(out, task, own, act, sums, references, totals, to_log2, sinks);
    } else if (range.part < 0) {
        workspace.merged.add(sums, references, totals, own.num_rows, true, to_log2, rows);
        sync_threads();
        finish_segments(out, task, workspace.merged, own, rows, 0, 1, act, to_log2, sinks);
    } else {
        const SegmentResults& parts = workspace.parts;
        const long long stride = (long long)(task.num_kv_heads) * kQueryRows;
        const int slot = step.tiles[4 * task.tile + 3], first_slot = slot - segment_number(range.part);
        const PartRows own_rows{slot * stride + task.kv_head * kQueryRows};
        const PartRows first_rows{first_slot * stride + task.kv_head * kQueryRows};
        parts.add(sums, references, totals, own.num_rows, false, to_log2, own_rows);
        const int num_segments = segment_number(own.last_seen(kQueryRows - 1)) + 1;
        unsigned* ticket = workspace.tickets + first_slot * task.num_kv_heads + task.kv_head;
        sync_threads();
        if (threadIdx.x == 0) *is_last = take_ticket(ticket) + 1 == unsigned(num_segments);
        sync_threads();
        if (!*is_last) return;
        finish_segments(out, task, parts, own, first_rows, stride, num_segments, act, to_log2, sinks);
        if (threadIdx.x == 0) *ticket = 0;
    }
}

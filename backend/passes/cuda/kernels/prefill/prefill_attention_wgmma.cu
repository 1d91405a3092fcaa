// prefill_attention.cu for sm_90a: two warpgroups compute, each with 64 query rows, a ninth warp takes tasks and copies
// keys and values, and three more load queries; with a quantised cache the ninth loads queries, and three convert. A row's result has the same properties; its bits differ. After FlashAttention-3 (arXiv
// 2407.08608).
//
// grid: as many blocks as run at once, or fewer; 384 threads. A block takes one task after another, and while it computes one,
// keys, values and queries of the next arrive. A warpgroup starts the product of the next tile's keys, then that of a
// tile's values, and takes the softmax of the next tile while the second one runs; warpgroups start products in turns.
//
// Macros: HEAD_DIM (64, 80, 96, 128 or 256), KV_DTYPE (bf16, or quantised and then multiplied as fp16).

#define NUM_WARPGROUPS 2
#if KV_DTYPE > 1
#define WGMMA_FP16
#endif
#define QUERY_ROWS 128
#define KEY_TOKENS (HEAD_DIM <= 128 ? 128 : 64)

#include "common/hopper.cuh"
#include "prefill/prefill_masks.cuh"
#include "prefill/prefill_ring.cuh"
#include "prefill/prefill_segments.cuh"
#include "prefill/prefill_tasks.cuh"

constexpr int kGroupBytes = 8 * 128;  // of 8 rows

struct Shared {
    unsigned char queries[kTaskSlots][kQueryBytes];
#if KV_DTYPE > 1
    unsigned char items[QuantisedTiles::Items::kBytes];
    static_assert(sizeof(items) % 1024 == 0, "tiles follow");
#endif
    Ring ring;
    TaskQueue tasks;
    int positions[kTaskSlots][kQueryRows];
    int is_last;
};

static_assert(kQueryBytes % 1024 == 0 && kTileBytes % 1024 == 0);

// Start scores = queries · keysᵀ for the warpgroup's rows.
__device__ __forceinline__ void start_scores(Scores& scores, const unsigned char* queries, const unsigned char* keys) {
    const unsigned long long a = matrix_descriptor(queries, 16, kGroupBytes);
    const unsigned long long b = matrix_descriptor(keys, 16, kGroupBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int column_bytes = step % 4 * 32;
        wgmma_shared(scores[0], a + (step / 4 * kQueryRows * 128 + column_bytes) / 16,
                   b + (step / 4 * kHalfBytes + column_bytes) / 16, step > 0);
    }
    wgmma_commit();
}

// Start sums += weights · values.
__device__ __forceinline__ void start_sums(Sums& sums, const Weights& weights, const unsigned char* values) {
    const unsigned long long b = matrix_descriptor(values, kHalfBytes, kGroupBytes);
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
        const unsigned long long of_step = b + step * 16 * 128 / 16;
#if HEAD_DIM == 256
        using Half = float[16][4];
        wgmma_by_rows(*reinterpret_cast<Half*>(&sums[0][0]), weights[0][step], of_step);
        wgmma_by_rows(*reinterpret_cast<Half*>(&sums[0][16]), weights[0][step], of_step + 2 * kHalfBytes / 16);
#else
        wgmma_by_rows(sums[0], weights[0][step], of_step);
#endif
    }
    wgmma_commit();
}

// softmax in two parts, for sums that are still under way during the first: scores become weights in their own registers.
__device__ __forceinline__ void exponentiate(Scores& scores, PerRow& references, PerRow& totals, PerRow& shrinks,
                                             float to_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        shrinks[0][half] = raise_reference(references[0][half], scores, 0, half, to_log2);
        const float offset = offset_of(references[0][half], to_log2);
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
            float &a = scores[0][j][2 * half], &b = scores[0][j][2 * half + 1];
            a = ex2_approx(a * to_log2 - offset);
            b = ex2_approx(b * to_log2 - offset);
            total += a + b;
        }
        totals[0][half] = totals[0][half] * shrinks[0][half] + total;
    }
}
__device__ __forceinline__ void apply(Weights& weights, const Scores& scores, Sums& sums, const PerRow& shrinks) {
    if (__any_sync(kWholeWarp, shrinks[0][0] != 1.0f || shrinks[0][1] != 1.0f)) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][c][i] *= shrinks[0][i / 2];
        }
    }
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            weights[0][j / 2][2 * (j & 1) + half] = pack(Factor{}, scores[0][j][2 * half], scores[0][j][2 * half + 1]);
        }
    }
}

// The positions that a warp or a warpgroup sees.
struct Sight {
    int first, last;  // rows' positions; last is -1 if there are none
    int window;

    // Through a shuffle, so that the compiler knows that all lanes have the same values.
    __device__ __forceinline__ Sight(const QueryTile<kQueryRows>& tile, int row, int num_rows, int window)
        : first(__shfl_sync(kWholeWarp, tile.position(row), 0)),
          last(__shfl_sync(kWholeWarp, row < tile.num_rows ? tile.position(row + num_rows - 1) : -1, 0)),
          window(window) {}
    __device__ __forceinline__ bool some(int token) const {
        return token <= last && token + kTokens - 1 > first - window;
    }
    __device__ __forceinline__ bool all(int token) const {
        return token + kTokens - 1 <= first && token > last - window;
    }
};

// Warpgroups start products in turns, so that one takes its softmax while the other's products run. Each takes and passes
// on a turn for every tile of a task, also for those that it skips.
struct Turns {
    static constexpr int kFirstBarrier = 2;
    int warpgroup;

    __device__ __forceinline__ explicit Turns(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == 1) pass_on();
    }
    __device__ __forceinline__ void take() const { sync_some<kThreads>(kFirstBarrier + warpgroup); }
    __device__ __forceinline__ void pass_on() const { arrive_some<kThreads>(kFirstBarrier + 1 - warpgroup); }
};

#if KV_DTYPE == 1
#define CACHE const __grid_constant__ TensorMap  // of this layer's pages, in boxes [page size, 64]
#else
#define CACHE unsigned char*
#endif

// As prefill_attention, but tickets begin with a
// counter of tasks. A task is a tile and a kv head; tasks of a tile follow each other. num_tasks: at least the blocks.
extern "C" __global__ void __launch_bounds__(kThreads + 128, 1)
    prefill_attention_wgmma(void* out, const void* qkv, CACHE cache, const int* page_table,
                            const int* context_lens, const int* query_starts, const int* slots, const int* tiles,
                            const float* sinks, float* merged_sums, float2* merged_peaks, float* part_sums,
                            float2* part_peaks, unsigned* tickets, int act, int row_heads, int max_pages, int page_bits,
                            int group, int window, float scale, float soft_cap, int num_kv_heads, int num_tasks) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    const PrefillStep step{page_table, context_lens, query_starts,
                           slots,      tiles,        max_pages,
                           group,      window > 0 ? window : 1 << 30};
    if (threadIdx.x == 0) {
        shared.ring.init();
        shared.tasks.init();
        fence_stores();
    }
    __syncthreads();

    if (threadIdx.x >= kThreads) {
        keep_registers<(HEAD_DIM == 256 ? 40 : 56)>();
        const bool is_ninth = threadIdx.x / 32 == kComputingWarps;
        const int thread = int(threadIdx.x) - kThreads - (is_ninth ? 0 : 32);
        const auto load = [&](int slot, int number) {
            const Task task = task_of(number, num_kv_heads);
            const QueryTile<kQueryRows> tile(step, task.tile);
#pragma unroll 1
            for (int row = thread; row < kQueryRows; row += kLoadingThreads)
                shared.positions[slot][row] = tile.position(row);
            copy_queries(shared.queries[slot], tile, qkv, row_heads, act, task.kv_head, thread);
        };
        if (!is_ninth) {
#if KV_DTYPE == 1
            shared.tasks.each(true, load);
#else
            QuantisedTiles tiles_of_block{shared.ring, shared.items, thread};
            shared.tasks.each(false, [&](int, int number) {
                const Task task = task_of(number, num_kv_heads);
                const QueryTile<kQueryRows> tile(step, task.tile);
                const KeyRange range(step, task.tile, tile, window);
                tiles_of_block.run(KvPlaces(cache, task, tile.pages, page_bits, range.begin, range.end));
            });
#endif
            return;
        }
#if KV_DTYPE == 1
        BoxCopies copies(shared.ring, cache, page_bits);
#endif
        int number = int(blockIdx.x);
        for (int turn = 0;; ++turn, number = claim_task(tickets, num_tasks)) {
            // The tiles are those of a layer without a window.
            const auto is_empty = [&](int tile) {
                return step.is_padding(tile) || (window > 0 && tiles[4 * tile + 2] > 0);
            };
            while (number < num_tasks && is_empty(number / num_kv_heads)) number = claim_task(tickets, num_tasks);
            const bool is_task = number < num_tasks;
            shared.tasks.post(turn, is_task ? number : -1);
#if KV_DTYPE == 1
            if (!is_task) return;
            const Task task = task_of(number, num_kv_heads);
            const QueryTile<kQueryRows> tile(step, task.tile);
            const KeyRange range(step, task.tile, tile, window);
            copies.run(task, tile.pages, range.begin, range.end, tile.length);
#else
            if (is_task) load(turn % kTaskSlots, number);
            shared.tasks.give(turn);
            if (!is_task) return;
#endif
        }
    }
    take_registers<(HEAD_DIM == 256 ? 232 : 224)>();
    const float to_log2 = soft_cap > 0.0f ? kLog2E : scale * kLog2E;
    const SegmentWorkspace workspace{{merged_sums, merged_peaks}, {part_sums, part_peaks}, tickets + 1};
    const int warpgroup = __shfl_sync(kWholeWarp, int(threadIdx.x / 128), 0);
    const Turns turns(warpgroup);
    int number = 0;  // of the tile of keys at `first`, among all of the block
    shared.tasks.each_loaded([&](int slot, int task_number) {
        const Task task = task_of(task_number, num_kv_heads);
        const QueryTile<kQueryRows> tile(step, task.tile);
        const KeyRange range(step, task.tile, tile, window);
        Sums sums;
        PerRow references, totals;
        reset(sums, references, totals);
        const Sight warp(tile, int(threadIdx.x / 32) * 16, 16, step.window);
        const Sight own(tile, warpgroup * 64, 64, step.window);
        const unsigned char* queries = shared.queries[slot] + warpgroup * 64 * 128;
        Scores scores;
        Weights weights;
        const auto skip = [&] {
            turns.take();
            turns.pass_on();
            for (int i = 0; i < 2; ++i, ++number) {
                shared.ring.wait(number);
                __syncwarp();  // Without products no lane waits for the others: one might miss two phases.
                shared.ring.release(number);
            }
        };
        const auto mask_scores = [&](int first) {
            if (soft_cap > 0.0f) cap_scores(scores, scale, soft_cap);
            if (!warp.all(first)) mask(scores, shared.positions[slot], first, step.window);
        };
        for (int first = range.begin / kTokens * kTokens; first < range.end;) {
            const int stop = range.stop(first, window);
            for (; first < stop && !own.some(first); first += kTokens) skip();
            if (first < stop) {
                const unsigned char* keys = shared.ring.wait(number);
                turns.take();
                wgmma_fence();
                start_scores(scores, queries, keys);
                turns.pass_on();
                wgmma_wait<0>();
                pin(scores[0]);
                shared.ring.release(number);
                mask_scores(first);
                softmax(weights, scores, sums, references, totals, to_log2);
                for (; first + kTokens < stop && own.some(first + kTokens); first += kTokens, number += 2) {
                    const unsigned char* next_keys = shared.ring.wait(number + 2);
                    turns.take();
                    pin(sums[0]);
                    wgmma_fence();
                    start_scores(scores, queries, next_keys);
                    const unsigned char* values = shared.ring.wait(number + 1);
                    wgmma_fence();
                    start_sums(sums, weights, values);
                    turns.pass_on();
                    wgmma_wait<1>();  // the scores are there; the sums are still under way
                    pin(scores[0]);
                    shared.ring.release(number + 2);
                    mask_scores(first + kTokens);
                    PerRow shrinks;
                    exponentiate(scores, references, totals, shrinks, to_log2);
                    finish_before(totals[0][0] + totals[0][1]);  // the softmax
                    wgmma_wait<0>();
                    pin(sums[0]);
                    shared.ring.release(number + 1);
                    apply(weights, scores, sums, shrinks);
                }
                const unsigned char* values = shared.ring.wait(number + 1);
                pin(sums[0]);
                wgmma_fence();
                start_sums(sums, weights, values);
                wgmma_wait<0>();
                pin(sums[0]);
                shared.ring.release(number + 1);
                first += kTokens;
                number += 2;
            }
            for (; first < stop; first += kTokens) skip();
            if (stop == range.end) break;
            const OutputRows rows(step, task);
            workspace.merged.add(sums, references, totals, rows.tile.num_rows, stop > kShortestSegment, to_log2, rows);
            reset(sums, references, totals);
        }
        finish_task(out, step, task, workspace, range, window, act, sums, references, totals, to_log2, sinks,
                    &shared.is_last);
    });
}

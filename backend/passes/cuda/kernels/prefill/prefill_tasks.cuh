// The tasks of a block that takes one after another. The copying warp takes a task when all copies of the last one have
// begun, so that a block that is late takes fewer. Loading warps then bring its queries, while the others still compute.
//
// Macros: HEAD_DIM, NUM_WARPGROUPS.

#pragma once

#include "prefill/prefill_ring.cuh"

constexpr int kTaskSlots = HEAD_DIM <= 128 ? 2 : 1;  // as many as shared memory holds queries of
constexpr int kLoadingThreads = kIsQuantised ? 32 : 96;
constexpr int kQueryBytes = kQueryRows * kHalves * 128;  // swizzled in rows of 128 bytes, like tiles

__device__ __forceinline__ Task task_of(int number, int num_kv_heads) {
    return {number % num_kv_heads, num_kv_heads, number / num_kv_heads};
}

// The number of the next task, or one that is too large. A block's first one is its own number. Blocks claim num_tasks times
// in all, and the last claim makes the counter 0 again. All lanes of a warp call together.
__device__ __forceinline__ int claim_task(unsigned* counter, int num_tasks) {
    unsigned claimed = 0;
    if ((threadIdx.x & 31) == 0) claimed = gridDim.x + atomicInc(counter, unsigned(num_tasks - 1));
    return int(__shfl_sync(kWholeWarp, claimed, 0));
}

// In shared memory. Tasks take slots in turn; a slot is also that of their queries.
struct TaskQueue {
    Barrier posted[kTaskSlots], loaded[kTaskSlots], empty[kTaskSlots];
    int numbers[kTaskSlots];  // -1: there are no more

    __device__ __forceinline__ void init() {
        for (int slot = 0; slot < kTaskSlots; ++slot) {
            barrier_init(&posted[slot], 1);
            barrier_init(&loaded[slot], kLoadingThreads / 32);
            barrier_init(&empty[slot], kComputingWarps);
        }
    }

    __device__ __forceinline__ void post(int turn, int number) {
        const int slot = turn % kTaskSlots;
        barrier_wait(&empty[slot], (turn / kTaskSlots & 1) ^ 1);
        if ((threadIdx.x & 31) != 0) return;
        numbers[slot] = number;
        barrier_arrive(&posted[slot]);
    }

    // Call work(slot, number) for each task. All warps beside the one that posts and the computing ones call. is_loading:
    // the work is to load queries.
    template <class F> __device__ __forceinline__ void each(bool is_loading, const F& work) {
        pass_through(posted, is_loading ? loaded : nullptr, work);
    }
    // Queries of the turn's task have come. A loading warp calls.
    __device__ __forceinline__ void give(int turn) { arrive(&loaded[turn % kTaskSlots]); }
    // Call compute(slot, number) for each task whose queries have come. All computing warps call.
    template <class F> __device__ __forceinline__ void each_loaded(const F& compute) {
        pass_through(loaded, empty, compute);
    }

  private:
    __device__ __forceinline__ void arrive(Barrier* barrier) {
        fence_stores();
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
    }

    template <class F>
    __device__ __forceinline__ void pass_through(Barrier* before, Barrier* after, const F& work) {
        for (int turn = 0;; ++turn) {
            const int slot = turn % kTaskSlots;
            barrier_wait(&before[slot], turn / kTaskSlots & 1);
            const int number = __shfl_sync(kWholeWarp, numbers[slot], 0);
            if (number >= 0) work(slot, number);
            if (after != nullptr) arrive(&after[slot]);
            if (number < 0) return;
        }
    }
};

// load_queries, but numbers of 16 bits are copied all at once, and then converted where they lie, unless they need no
// conversion. Rows that do not exist become copies of the last one.
__device__ __forceinline__ void copy_queries(unsigned char* target, const QueryTile<kQueryRows>& tile, const void* qkv,
                                             int row_heads, int act, int kv_head, int thread) {
    if (act == 0) return load_queries<kLoadingThreads, 1>(target, tile, qkv, row_heads, act, kv_head, thread);
#pragma unroll 1
    for (int i = thread; i < kQueryRows * kChunks; i += kLoadingThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        const long long head = tile.head(min(row, tile.num_rows - 1), row_heads, kv_head * tile.group);
        const void* source = static_cast<const unsigned short*>(qkv) + head * HEAD_DIM + chunk * 8;
        cp_async_16(target + query_place(row, chunk), source);
    }
    cp_async_commit();
    cp_async_wait<0>();
    if (act == (kIsQuantised ? 2 : 1)) return;
#pragma unroll 1
    for (int i = thread; i < kQueryRows * kChunks; i += kLoadingThreads) {
        unsigned char* place = target + query_place(i / kChunks, i % kChunks);
        float x[8];
        if (kIsQuantised) load8(reinterpret_cast<const Bf16*>(place), x);
        else load8(reinterpret_cast<const Fp16*>(place), x);
        store8(reinterpret_cast<Factor*>(place), x);
    }
}

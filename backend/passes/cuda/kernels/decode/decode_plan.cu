// Lists the items of decode attention once per step, longest chunks first. All layers of the same window use the list.

#include "decode/decode_items.cuh"

constexpr int kWarps = NUM_THREADS / 32;
constexpr int kBuckets = 128;  // of lengths: 4 per power of two

// Bucket 0 has the longest chunks. The order within a bucket is arbitrary; results do not depend on it.
__device__ __forceinline__ int bucket_of(int tokens) {
    const int octave = 31 - __clz(tokens);
    const int quarter = octave < 2 ? 0 : tokens >> (octave - 2) & 3;
    return kBuckets - 1 - (4 * octave + quarter);
}

constexpr int kMostDoublings = 3;

// The step's shortest chunk: usual, or as much longer as leaves every block three items or more, or half as long for a
// step that does not fill the device. A long chunk costs less a token. full_items: of a step that fills the device.
__device__ __forceinline__ int shortest_chunk(int usual, int items, int full_items) {
    if (items < full_items) return usual / 2;
    int doublings = 0;
    while (doublings < kMostDoublings && items >> doublings >= 2 * full_items) ++doublings;
    return usual << doublings;
}

// context_lens, slots: [num_rows]. A row without a slot (-1) is skipped. items has space for num_rows * max_chunks.
// chunk_tokens: of the shortest chunk; full_items as in shortest_chunk, or 0: it has chunk_tokens in any step.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    plan_decode(const int* __restrict__ context_lens, const int* __restrict__ slots, Item* __restrict__ items,
                Plan* __restrict__ plan, int num_rows, int chunk_tokens, int full_items, int window, int max_chunks) {
    __shared__ int places[kBuckets];  // first the number of items, then the index of the next item
    __shared__ int usual_items;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < kBuckets; i += NUM_THREADS) places[i] = 0;
    if (threadIdx.x == 0) usual_items = 0;
    __syncthreads();
    int shortest = chunk_tokens;
    if (full_items > 0) {
        int own_items = 0;
        for (int row = threadIdx.x; row < num_rows; row += NUM_THREADS) {
            if (slots[row] >= 0) own_items += (context_lens[row] + chunk_tokens) / chunk_tokens;
        }
        atomicAdd(&usual_items, own_items);
        __syncthreads();
        shortest = shortest_chunk(chunk_tokens, usual_items, full_items);
    }

    for (int row = threadIdx.x; row < num_rows; row += NUM_THREADS) {
        if (slots[row] < 0) continue;
        const int length = context_lens[row] + 1;
        const Span span(length, window, max_chunks, shortest);
        const int last = span.num_chunks - 1;
        if (last > 0) atomicAdd(&places[bucket_of(span.chunk_tokens)], last);
        atomicAdd(&places[bucket_of(length - span.start(last))], 1);
    }
    __syncthreads();

    if (warp == 0) {
        constexpr int kOwn = kBuckets / 32;
        int counts[kOwn], total = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) total += counts[i] = places[lane * kOwn + i];
        int before = total;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, before, distance);
            if (lane >= distance) before += other;
        }
        if (lane == 31) *plan = Plan{before, shortest};
        before -= total;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            places[lane * kOwn + i] = before;
            before += counts[i];
        }
    }
    __syncthreads();

    for (int row = warp; row < num_rows; row += kWarps) {
        const int slot = slots[row];
        if (slot < 0) continue;
        const int length = context_lens[row] + 1;
        const Span span(length, window, max_chunks, shortest);
        const int last = span.num_chunks - 1;
        int place = 0;
        if (lane == 0 && last > 0) place = atomicAdd(&places[bucket_of(span.chunk_tokens)], last);
        place = __shfl_sync(0xffffffffu, place, 0);
        for (int chunk = lane; chunk < last; chunk += 32) items[place + chunk] = Item{row, slot, length, chunk};
        if (lane == 0) {
            place = atomicAdd(&places[bucket_of(length - span.start(last))], 1);
            items[place] = Item{row, slot, length, last};
        }
    }
}

// Attention of rows with one token each over their paged keys and values.
//
// A block processes items (decode_items.cuh), each with a KV head: the queries of the head's group over one chunk of a
// row's context. Its warps share the chunk's tiles. Each warp has its own softmax state; the block merges them at the
// end, while the next item's tiles arrive. A row of one chunk is then finished. The chunks of a longer row write their
// peaks, sums and unnormalised outputs to the workspace, and the block that finishes last merges them in chunk order.
// So a row's output depends only on the row.
//
// Macros: KV_DTYPE, HEAD_DIM, NUM_WARPS, RING_TILES. Dynamic shared memory: NUM_WARPS rings of RING_TILES tiles.

#include "decode/decode_stream.cuh"
#include "common/reduce.cuh"
#include "common/sinks.cuh"
#if KV_DTYPE == 0
#include "decode/decode_heads_fp32.cuh"
#else
#include "decode/decode_heads_mma.cuh"
#endif

constexpr int kThreads = 32 * NUM_WARPS;
constexpr int kFp32 = 0, kBf16 = 1;  // values of act; 2 is fp16

// A block's current work.
struct Work {
    int row, chunk, num_chunks, kv_head;
};

__device__ __forceinline__ void store4(void* target, long long at, int act, float4 x) {
    if (act == kFp32) {
        *reinterpret_cast<float4*>(static_cast<float*>(target) + at) = x;
    } else {
        const bool bf16 = act == kBf16;
        *reinterpret_cast<uint2*>(static_cast<unsigned short*>(target) + at) =
            make_uint2(bf16 ? pack_bf16x2(x.x, x.y) : pack_f16x2(x.x, x.y),
                       bf16 ? pack_bf16x2(x.z, x.w) : pack_f16x2(x.z, x.w));
    }
}

__device__ __forceinline__ void add_scaled(float4& acc, float factor, float4 x) {
    acc.x = fmaf(factor, x.x, acc.x);
    acc.y = fmaf(factor, x.y, acc.y);
    acc.z = fmaf(factor, x.z, acc.z);
    acc.w = fmaf(factor, x.w, acc.w);
}

__device__ __forceinline__ float4 scaled(float4 x, float factor) {
    return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

__device__ __forceinline__ void load_queries(WarpHeads& heads, const void* qkv, long long at, int act, int group) {
    if (act == kFp32) heads.load_queries(static_cast<const float*>(qkv) + at, group);
    else if (act == kBf16) heads.load_queries(static_cast<const Bf16*>(qkv) + at, group);
    else heads.load_queries(static_cast<const Fp16*>(qkv) + at, group);
}

// Four dimensions of a head, merged from several pieces of the context.
struct Merged {
    float peak = kNoPeak, sum = 0.0f;  // common greatest logit, and the sum of the weights relative to it
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
};

// The output, and the partial results of chunks in the workspace.
struct Results {
    void* out;      // [row][head][HEAD_DIM], of the type that act names
    float* chunks;  // [row][head][max_chunks][HEAD_DIM], unnormalised
    float2* peaks;  // [row][head][max_chunks]: greatest logit, and sum of the weights relative to it
    const float* sinks;  // [head]: a score that takes part in the softmax and has no value; -infinity for none
    int act, num_kv_heads, group, max_chunks;

    // Merge the warps' results of heads first_head and up to kMergeHeads - 1 more into the chunk's. rows: each warp's,
    // [kMergeHeads][kMergeStride].
    __device__ __forceinline__ void merge_warps(const Work& work, int first_head, const float* const* rows,
                                                const float2 (*row_peaks)[kMaxGroup]) const {
        const int count = min(group - first_head, kMergeHeads);
        for (int i = 4 * threadIdx.x; i < count * HEAD_DIM; i += 4 * kThreads) {
            const int place = i / HEAD_DIM, head = first_head + place, dim = i % HEAD_DIM;
            Merged merged;
#pragma unroll
            for (int w = 0; w < NUM_WARPS; ++w) merged.peak = fmaxf(merged.peak, row_peaks[w][head].x);
#pragma unroll
            for (int w = 0; w < NUM_WARPS; ++w) {
                const float factor = ex2_approx(row_peaks[w][head].x - merged.peak);
                merged.sum = fmaf(factor, row_peaks[w][head].y, merged.sum);
                const float* row = rows[w] + place * kMergeStride + dim;
                add_scaled(merged.out, factor, *reinterpret_cast<const float4*>(row));
            }
            if (work.num_chunks == 1) {
                store(work, head, dim, merged);
            } else {
                const long long at = head_of(work, head) * max_chunks + work.chunk;
                *reinterpret_cast<float4*>(chunks + at * HEAD_DIM + dim) = merged.out;
                if (dim == 0) peaks[at] = make_float2(merged.peak, merged.sum);
            }
        }
    }

    // A warp merges a head: each lane reads the peak of one chunk of 32, then four dimensions of all of them in order.
    __device__ __forceinline__ void merge_chunks(const Work& work) const {
        const int lane = threadIdx.x % 32;
        for (int head = threadIdx.x / 32; head < group; head += NUM_WARPS) {
            const long long place = head_of(work, head) * max_chunks;
            const float2* own_peak = peaks + place + lane;
            float peak = kNoPeak;
#pragma unroll 4
            for (int first = 0; first < work.num_chunks; first += 32) {
                if (first + lane < work.num_chunks) peak = fmaxf(peak, own_peak[first].x);
            }
            peak = reduce_lanes(peak, 32, Largest{});
#pragma unroll 1
            for (int from = 0; from < HEAD_DIM; from += 128) {
                const int dim = from + 4 * lane;
                const float* row = chunks + place * HEAD_DIM + min(dim, HEAD_DIM - 4);
                Merged merged;
#pragma unroll 1
                for (int first = 0; first < work.num_chunks; first += 32) {
                    const int count = min(work.num_chunks - first, 32);
                    const float2 own = lane < count ? own_peak[first] : make_float2(kNoPeak, 0.0f);
                    const float own_factor = ex2_approx(own.x - peak);
                    merged.sum = fmaf(own_factor, own.y, merged.sum);
#pragma unroll 8
                    for (int i = 0; i < count; ++i, row += HEAD_DIM) {
                        const float factor = __shfl_sync(kWholeWarp, own_factor, i);
                        add_scaled(merged.out, factor, *reinterpret_cast<const float4*>(row));
                    }
                }
                merged.peak = peak;
                merged.sum = reduce_lanes(merged.sum, 32, Sum{});
                if (dim < HEAD_DIM) store(work, head, dim, merged);
            }
        }
    }

  private:
    __device__ __forceinline__ long long head_of(const Work& work, int head) const {
        return (static_cast<long long>(work.row) * num_kv_heads + work.kv_head) * group + head;
    }
    __device__ __forceinline__ void store(const Work& work, int head, int dim, const Merged& merged) const {
        const float divisor = sum_with_sink(merged.peak, merged.sum, sinks[work.kv_head * group + head]);
        store4(out, head_of(work, head) * HEAD_DIM + dim, act, scaled(merged.out, 1.0f / divisor));
    }
};

// The items that a block claims beyond its first three, in one thread. counters: see decode_attention.
struct Claims {
    unsigned* counters;
    int count, second_next;
    bool is_open;          // whether there may be more
    unsigned answer = 0;   // to what was asked last
    unsigned num_ended = 0;

    __device__ __forceinline__ Claims(unsigned* counters, int count)
        : counters(counters), count(count), second_next(blockIdx.x + 2 * gridDim.x), is_open(count > first()) {}

    // Claim one; the answer arrives while the block computes.
    __device__ __forceinline__ void ask() {
        if (is_open) answer = atomicAdd(counters, 1u);
    }
    __device__ __forceinline__ void receive() {
        second_next = is_open ? first() + int(answer) : count;
        if (is_open && second_next >= count) close();
    }
    // The block that ends last sets the counters back. By then all others have their last answers.
    __device__ __forceinline__ void end() {
        if (is_open) close();
        if (num_ended + 1 != gridDim.x) return;
        atomicExch(counters, 0u);
        atomicExch(counters + 1, 0u);
    }

  private:
    __device__ __forceinline__ static int first() { return 3 * gridDim.x; }
    __device__ __forceinline__ void close() {
        is_open = false;
        num_ended = atomicAdd(counters + 1, 1u);
    }
};

// The ticket of a chunk whose results are in the workspace. It is drawn after the item, and looked at after the next one:
// so nobody waits for it.
struct Ticket {
    Work& work;  // in shared memory; of one chunk at first
    unsigned* tickets;
    int num_kv_heads;
    unsigned number = 0;  // in thread 0

    __device__ __forceinline__ Ticket(Work& work, unsigned* tickets, int num_kv_heads)
        : work(work), tickets(tickets), num_kv_heads(num_kv_heads) {
        if (threadIdx.x == 0) work = Work{0, 0, 1, 0};
    }
    // All threads call, after a barrier behind the results.
    __device__ __forceinline__ void draw(const Work& done) {
        if (threadIdx.x != 0) return;
        work = done;
        if (done.num_chunks > 1) number = take_ticket(place());
    }
    // In thread 0.
    __device__ __forceinline__ bool is_last() const {
        return work.num_chunks > 1 && number + 1 == static_cast<unsigned>(work.num_chunks);
    }
    __device__ __forceinline__ void finish(const Results& results) const {
        results.merge_chunks(work);
        if (threadIdx.x == 0) *place() = 0;
    }

  private:
    __device__ __forceinline__ unsigned* place() const { return tickets + work.row * num_kv_heads + work.kv_head; }
};

// qkv [rows, (group + 2) * num_kv_heads * HEAD_DIM] and out [rows, group * num_kv_heads * HEAD_DIM] have the type that
// act names. cache: the layer's pages. sinks: see Results. page_table: [slots, max_pages]. items, plan: written by
// plan_decode with the same window and max_chunks. chunks, peaks: see Results. tickets: [rows * num_kv_heads], 0 before
// and after. claims [2]: items that blocks have claimed, and blocks that have ended; 0 before and after.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    decode_attention(const void* qkv, unsigned char* cache, const int* page_table, const Item* items,
                     const Plan* plan, float* chunks, float2* peaks, unsigned* tickets, unsigned* claims,
                     const float* __restrict__ sinks, void* out, int act, int max_pages, int group, int num_kv_heads,
                     int page_shift, int window, int max_chunks, float scale, float softcap) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ WarpHeads::Shared heads_shared;
    __shared__ TileStream::Queued queued[NUM_WARPS], upcoming;
    __shared__ float2 warp_peaks[NUM_WARPS][kMaxGroup];
    __shared__ const float* warp_rows[NUM_WARPS];
    __shared__ Work last_work;
    __shared__ int is_last;
    const int warp = threadIdx.x / 32;
    // All blocks run at once, so the next product begins to fetch its weights beside those that have no item left.
    let_next_kernel_begin();
    wait_for_earlier_kernels();
    const Plan found_plan = *plan;
    const int count = found_plan.num_items * num_kv_heads;
    const auto find = [&](int index) {
        TileStream::Queued found{{}, -1};
        if (index < count) found = TileStream::Queued{items[index / num_kv_heads], index % num_kv_heads};
        return found;
    };

    const Results results{out, chunks, peaks, sinks, act, num_kv_heads, group, max_chunks};
    const Scorer scorer(scale, softcap);
    WarpHeads heads(heads_shared);
    TileStream stream(shared + warp * RING_TILES * kTileBytes, cache, page_table, queued[warp], max_pages, page_shift,
                      num_kv_heads, window, max_chunks, found_plan.shortest_chunk);
    TileStream::Queued current = find(blockIdx.x), coming = find(blockIdx.x + gridDim.x);
    if (current.kv_head >= 0) stream.open(current);
    if (coming.kv_head >= 0) stream.queue(coming);
    bool more = coming.kv_head >= 0;
    // Thread 0's: a block has three items from the start. Multiprocessors do not read equally fast, so it claims further
    // ones, two ahead, until none is left.
    Claims claimed(claims, count);
    Ticket ticket(last_work, tickets, num_kv_heads);  // of the item before this one, which may be the last of its row
    while (current.kv_head >= 0) {
        const Item& item = current.item;
        const Span span(item.length, window, max_chunks, found_plan.shortest_chunk);
        const Work work{item.row, item.chunk, span.num_chunks, current.kv_head};
        stream.read(item, span);
        // Outputs of wide heads, and scales, need the registers.
        constexpr bool kLooksLate = HEAD_DIM > 128 || KV_DTYPE == 2;
        TileStream::Queued found{{}, -1};
        if (threadIdx.x == 0) {
            if (!kLooksLate) found = find(claimed.second_next);
            claimed.ask();
        }

        const long long qkv_row = static_cast<long long>(work.row) * (group + 2) * num_kv_heads;
        load_queries(heads, qkv, (qkv_row + work.kv_head * group) * HEAD_DIM, act, group);
        for (int tile = 0; stream.token(tile) < stream.end; ++tile) {
            heads.add_keys(stream.next(0), scorer, stream.token(tile), stream.begin, stream.end, group);
            heads.add_values(stream.next(1), stream.token(tile), stream.end, group);
        }
        if (threadIdx.x == 0) {
            if (kLooksLate) found = find(claimed.second_next);
            upcoming = found;
            claimed.receive();
            is_last = ticket.is_last();
        }
        current.kv_head = -1;
        if (more) current = stream.advance();
        __syncwarp();  // all lanes have read the last tile, whose memory takes the warp's results
        float* rows = reinterpret_cast<float*>(stream.last_read());
        if (threadIdx.x % 32 == 0) warp_rows[warp] = rows;
        heads.store<0>(rows, warp_peaks[warp], scorer, group);
        __syncthreads();
        more = upcoming.kv_head >= 0;
        if (more) stream.queue(upcoming);
        if (current.kv_head >= 0) stream.fill();
        results.merge_warps(work, 0, warp_rows, warp_peaks);
        if (is_last) ticket.finish(results);
        __syncthreads();  // the results have been read, so the next ones, or tiles, can overwrite them
        if (group > kMergeHeads) {
            heads.store<kMergeHeads>(rows, warp_peaks[warp], scorer, group);
            __syncthreads();
            results.merge_warps(work, kMergeHeads, warp_rows, warp_peaks);
            __syncthreads();
        }
        ticket.draw(work);
    }
    if (threadIdx.x == 0) is_last = ticket.is_last();
    __syncthreads();
    if (is_last) ticket.finish(results);
    if (threadIdx.x == 0) claimed.end();
}

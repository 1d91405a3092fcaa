// Attention of rows with one token each over their paged keys and values.
//
// A block takes an item (decode_items.cuh) and a KV head: the queries of the head's group over one chunk of a row's
// context. Its warps share the chunk's tiles, each with a softmax of its own, and are merged at the end. A row of one
// chunk is then done. Of a longer one the chunks leave their peaks, sums and unnormalised outputs in the workspace, and
// the block that comes last merges them in their order: what a row becomes depends on nothing but the row.
//
// Macros: KV_DTYPE, HEAD_DIM, NUM_WARPS. Dynamic shared memory: NUM_WARPS rings of ring_tiles tiles, or the merge's rows
// where those are more.

#include "decode_stream.cuh"
#if KV_DTYPE == 0
#include "decode_heads_fp32.cuh"
#else
#include "decode_heads_mma.cuh"
#endif

constexpr int kThreads = 32 * NUM_WARPS;
constexpr int kFp32 = 0, kBf16 = 1;  // values of act; 2 is fp16

struct Sizes {
    int num_heads, num_kv_heads, group, max_chunks;
};

struct Partials {
    float* out;     // [row][head][max_chunks][HEAD_DIM], unnormalised
    float2* peaks;  // [row][head][max_chunks]: greatest logit, and sum of the weights relative to it
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

__device__ __forceinline__ float4 divide(float4 x, float by) {
    return make_float4(x.x / by, x.y / by, x.z / by, x.w / by);
}

__device__ __forceinline__ void load_queries(WarpHeads& heads, const void* qkv, long long at, int act, int group) {
    if (act == kFp32) heads.load_queries(static_cast<const float*>(qkv) + at, group);
    else if (act == kBf16) heads.load_queries(static_cast<const Bf16*>(qkv) + at, group);
    else heads.load_queries(static_cast<const Fp16*>(qkv) + at, group);
}

// Four dimensions of a head, from `count` pieces that lie stride floats and peak_stride peaks apart: their common peak,
// sum of weights, and sum of outputs.
struct Merged {
    float peak, sum;
    float4 out;

    __device__ __forceinline__ Merged(const float* outs, int stride, const float2* peaks, int peak_stride, int count)
        : peak(kNoPeak), sum(0.0f), out(make_float4(0.0f, 0.0f, 0.0f, 0.0f)) {
        for (int i = 0; i < count; ++i) peak = fmaxf(peak, peaks[i * peak_stride].x);
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const float2 own = peaks[i * peak_stride];
            const float factor = ex2_approx(own.x - peak);
            sum = fmaf(factor, own.y, sum);
            add_scaled(out, factor, *reinterpret_cast<const float4*>(outs + static_cast<long long>(i) * stride));
        }
    }
};

// The warps' results, rows [NUM_WARPS][group][kMergeStride], become the chunk's.
__device__ __forceinline__ void merge_warps(const float* rows, const float2 (*peaks)[kMaxGroup], const Sizes& sizes,
                                            const Partials& partials, void* out, int act, int row, int first_head,
                                            int chunk, bool alone) {
    for (int i = 4 * threadIdx.x; i < sizes.group * HEAD_DIM; i += 4 * kThreads) {
        const int head = i / HEAD_DIM, dim = i % HEAD_DIM;
        const Merged merged(rows + head * kMergeStride + dim, sizes.group * kMergeStride, &peaks[0][head], kMaxGroup,
                            NUM_WARPS);
        const long long at = static_cast<long long>(row) * sizes.num_heads + first_head + head;
        if (alone) {
            store4(out, at * HEAD_DIM + dim, act, divide(merged.out, merged.sum));
        } else {
            const long long place = at * sizes.max_chunks + chunk;
            *reinterpret_cast<float4*>(partials.out + place * HEAD_DIM + dim) = merged.out;
            if (dim == 0) partials.peaks[place] = make_float2(merged.peak, merged.sum);
        }
    }
}

__device__ __forceinline__ void merge_chunks(const Sizes& sizes, const Partials& partials, void* out, int act, int row,
                                             int first_head, int num_chunks) {
    for (int i = 4 * threadIdx.x; i < sizes.group * HEAD_DIM; i += 4 * kThreads) {
        const int head = i / HEAD_DIM, dim = i % HEAD_DIM;
        const long long at = static_cast<long long>(row) * sizes.num_heads + first_head + head;
        const long long place = at * sizes.max_chunks;
        const Merged merged(partials.out + place * HEAD_DIM + dim, HEAD_DIM, partials.peaks + place, 1, num_chunks);
        store4(out, at * HEAD_DIM + dim, act, divide(merged.out, merged.sum));
    }
}

// qkv: [rows, (num_heads + 2 num_kv_heads) * HEAD_DIM] and out: [rows, num_heads * HEAD_DIM], of the type that act names. cache: the layer's.
// page_table: [slots, max_pages]. items, num_items: plan_decode's, with the same window and max_chunks. tickets:
// [rows * num_kv_heads], 0 before and after.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    decode_attention(const void* __restrict__ qkv, unsigned char* __restrict__ cache,
                     const int* __restrict__ page_table, const Item* __restrict__ items,
                     const int* __restrict__ num_items, float* partial_out, float2* partial_peaks, unsigned* tickets,
                     void* __restrict__ out, int act, int max_pages, int num_heads, int num_kv_heads, int page_shift,
                     int window, int max_chunks, int ring_tiles, float scale, float softcap) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float2 peaks[NUM_WARPS][kMaxGroup];
    __shared__ int is_last;
    const int warp = threadIdx.x / 32;
    const Sizes sizes{num_heads, num_kv_heads, num_heads / num_kv_heads, max_chunks};
    const Partials partials{partial_out, partial_peaks};
    const Scorer scorer(scale, softcap);
    __shared__ WarpHeads::Shared heads_shared;
    WarpHeads heads(heads_shared);
    TileStream stream;
    stream.layer = cache;
    stream.page_table = page_table;
    stream.ring = shared + warp * ring_tiles * kTileBytes;
    stream.ring_tiles = ring_tiles;
    stream.page_shift = page_shift;
    stream.max_pages = max_pages;
    stream.num_kv_heads = num_kv_heads;

    const int num_works = *num_items * num_kv_heads;
    int work = blockIdx.x;
    if (work >= num_works) return;
    Item item = items[work / num_kv_heads];
    Span span(item.length, window, max_chunks);
    stream.open(item, span, work % num_kv_heads);
    stream.start();
    while (true) {
        const int row = item.row, chunk = item.chunk, kv_head = work % num_kv_heads, num_chunks = span.num_chunks;
        const int first_head = kv_head * sizes.group;
        work += gridDim.x;
        const bool more = work < num_works;
        if (more) item = items[work / num_kv_heads];

        load_queries(heads, qkv, (static_cast<long long>(row) * (num_heads + 2 * num_kv_heads) + first_head) * HEAD_DIM, act, sizes.group);
        for (int tile = 0; tile < stream.num_tiles; ++tile) {
            heads.add_keys(stream.next(), scorer, stream.token(tile), stream.begin, stream.end, sizes.group);
            heads.add_values(stream.next(), sizes.group);
        }
        if (more) {
            span = Span(item.length, window, max_chunks);
            stream.open(item, span, work % num_kv_heads);
        }
        __syncthreads();  // the rings are free for the warps' results
        float* rows = reinterpret_cast<float*>(shared);
        heads.store(rows + warp * sizes.group * kMergeStride, peaks[warp], sizes.group);
        __syncthreads();
        merge_warps(rows, peaks, sizes, partials, out, act, row, first_head, chunk, num_chunks == 1);
        __syncthreads();  // and now for the next item's tiles
        if (more) stream.start();

        if (num_chunks > 1) {
            unsigned* ticket = tickets + row * num_kv_heads + kv_head;
            if (threadIdx.x == 0) is_last = take_ticket(ticket) == static_cast<unsigned>(num_chunks) - 1;
            __syncthreads();
            if (is_last) {
                merge_chunks(sizes, partials, out, act, row, first_head, num_chunks);
                if (threadIdx.x == 0) *ticket = 0;
            }
        }
        if (!more) break;
    }
}

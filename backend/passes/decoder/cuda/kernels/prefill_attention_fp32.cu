// prefill_attention.cu for an fp32 cache: everything in fp32, without tensor cores, for accuracy.
//
// grid (kv heads, query tiles), 256 threads. A warp has its own 8 or 4 query rows. For scores, a lane has one token of
// the tile; for sums, every 32nd value of the head.
//
// Macros: HEAD_DIM, KV_DTYPE (0).

#include "prefill_tile.cuh"

constexpr int kThreads = 256;
constexpr int kWarpRows = HEAD_DIM <= 128 ? 8 : 4;
constexpr int kQueryRows = kThreads / 32 * kWarpRows;
constexpr int kTokens = 32;
constexpr int kChunks = HEAD_DIM / 4;               // of 4 values
constexpr int kLaneValues = (HEAD_DIM + 31) / 32;   // of a head; not every lane has the last one

using Stream = KvStream<kThreads, kTokens, 2>;

__device__ __forceinline__ void load_queries(float* target, const QueryTile<kQueryRows>& tile, const void* qkv,
                                             int act) {
    const int heads_per_token = (tile.group + 2) * int(gridDim.x), first_head = int(blockIdx.x) * tile.group;
    for (int i = int(threadIdx.x); i < kQueryRows * HEAD_DIM / 8; i += kThreads) {
        const int row = i / (HEAD_DIM / 8), place = i % (HEAD_DIM / 8) * 8;
        float x[8] = {};
        if (row < tile.num_rows) {
            load8_act(qkv, tile.head(row, heads_per_token, first_head) * HEAD_DIM + place, act, x);
        }
        store8(target + row * HEAD_DIM + place, x);
    }
}

// scores[r] = query r of the warp · the lane's key
__device__ __forceinline__ void score(float (&scores)[kWarpRows], const float* queries, const unsigned char* keys) {
    const unsigned lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) scores[r] = 0.0f;
#pragma unroll 4
    for (int c = 0; c < kChunks; ++c) {
        const float4 k = *reinterpret_cast<const float4*>(keys + swizzled<kChunks>(lane, c) * 16);
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
            const float4 q = *reinterpret_cast<const float4*>(queries + r * HEAD_DIM + 4 * c);
            scores[r] += q.x * k.x;
            scores[r] += q.y * k.y;
            scores[r] += q.z * k.z;
            scores[r] += q.w * k.w;
        }
    }
}

// sums[r] += weights[r] · values
__device__ __forceinline__ void accumulate(float (&sums)[kWarpRows][kLaneValues], const float (&weights)[kWarpRows],
                                           const unsigned char* values) {
    const unsigned lane = threadIdx.x & 31;
#pragma unroll 4
    for (int token = 0; token < kTokens; ++token) {
        float v[kLaneValues];
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) {
            const unsigned place = lane + 32 * i;
            const unsigned char* chunk = values + swizzled<kChunks>(token, place / 4) * 16;
            v[i] = place < HEAD_DIM ? reinterpret_cast<const float*>(chunk)[place % 4] : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
            const float weight = __shfl_sync(kWholeWarp, weights[r], token);
#pragma unroll
            for (int i = 0; i < kLaneValues; ++i) sums[r][i] += weight * v[i];
        }
    }
}

__device__ __forceinline__ void store_act(void* array, long long index, int act, float x) {
    if (act == 0) {
        static_cast<float*>(array)[index] = x;
    } else {
        static_cast<unsigned short*>(array)[index] = act == 1 ? float_to_bf16(x) : float_to_f16(x);
    }
}

// Arguments as of prefill_attention.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    prefill_attention_fp32(void* out, const void* qkv, unsigned char* layer, const int* page_table,
                           const int* context_lens, const int* query_starts, const int* slots, const int* tiles,
                           const float* sinks, int act, int max_pages, int page_bits, int group, int window,
                           float scale, float soft_cap) {
    extern __shared__ __align__(16) unsigned char shared[];
    const PrefillStep step{page_table, context_lens, query_starts,
                           slots,      tiles,        max_pages,
                           group,      window > 0 ? window : 1 << 30};
    if (step.is_padding(int(blockIdx.y))) return;
    const QueryTile<kQueryRows> tile(step, int(blockIdx.y));
    const int lane = int(threadIdx.x & 31), warp_row = int(threadIdx.x / 32 * kWarpRows);
    int positions[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) positions[r] = tile.position(warp_row + r);
    const int warp_first = positions[0], warp_last = warp_row < tile.num_rows ? positions[kWarpRows - 1] : -1;

    float* queries = reinterpret_cast<float*>(shared);
    load_queries(queries, tile, qkv, act);
    const int begin = max(0, tile.position(0) - step.window + 1);
    const int end = tile.position(kQueryRows - 1) + 1;
    Stream stream(shared + kQueryRows * HEAD_DIM * 4, KvPlaces(layer, tile.pages, page_bits), begin, end);

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
                if (token > positions[r] || token <= positions[r] - step.window) x = -infinity();
                const float top = fmaxf(largest[r], reduce_lanes(x, 32, Largest{}));
                const float base = top == -infinity() ? 0.0f : top;  // -infinity: the row has seen no token yet
                const float shrink = ex2_approx((largest[r] - base) * kLog2E);
                scores[r] = ex2_approx((x - base) * kLog2E);
                totals[r] = totals[r] * shrink + scores[r];
                largest[r] = top;
#pragma unroll
                for (int i = 0; i < kLaneValues; ++i) sums[r][i] *= shrink;
            }
        }
        const unsigned char* values = stream.next<kValues>(first);
        if (sees_some) accumulate(sums, scores, values);
    }

    const int heads_per_token = group * int(gridDim.x), first_head = int(blockIdx.x) * group;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
        const float total = reduce_lanes(totals[r], 32, Sum{});
        if (warp_row + r >= tile.num_rows) continue;
        const float sink = sinks[first_head + tile.head_of_group(warp_row + r)];
        const float factor = 1.0f / sum_with_sink(largest[r] * kLog2E, total, sink);
        const long long start = tile.head(warp_row + r, heads_per_token, first_head) * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) {
            if (lane + 32 * i < HEAD_DIM) store_act(out, start + lane + 32 * i, act, sums[r][i] * factor);
        }
    }
}

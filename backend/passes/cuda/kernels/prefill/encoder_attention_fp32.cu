// encoder_attention.cu in fp32, without tensor cores, for accuracy. 256 threads.
//
// Macros: HEAD_DIM, KV_DTYPE (0).

#include "prefill/prefill_products_fp32.cuh"

using Stream = KvStream<kThreads, kTokens, 2, PackedPlaces>;

// Arguments as of encoder_attention.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    encoder_attention_fp32(void* out, const void* qkv, const int* row_starts, const int* tiles, const float* biases,
                           int reach, int window, float scale) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int* const tile_of_block = tiles + 2 * blockIdx.y;
    const QueryTile<kQueryRows> tile(row_starts, tile_of_block);
    const int length = row_starts[tile_of_block[0] + 1] - tile.first_token;
    const int side = window < 0 ? 1 << 29 : window;
    const int lane = int(threadIdx.x & 31), warp_row = int(threadIdx.x / 32 * kWarpRows);
    const bool has_rows = warp_row < tile.num_rows;
    const int warp_first = tile.position(warp_row), warp_last = tile.position(warp_row + kWarpRows - 1);
    const float* bias = biases + (long long)(blockIdx.x) * (2 * reach - 1) + reach - 1;  // of distance 0

    float* queries = reinterpret_cast<float*>(shared);
    load_queries(queries, tile, qkv, 3 * int(gridDim.x), KV_DTYPE);
    const int begin = max(0, tile.position(0) - side);
    const int end = min(length, tile.position(kQueryRows - 1) + side + 1);
    Stream stream(shared + kQueryRows * HEAD_DIM * 4, PackedPlaces(qkv, tile.first_token, begin, end));

    float sums[kWarpRows][kLaneValues] = {}, totals[kWarpRows] = {}, largest[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) largest[r] = -infinity();
    for (int first = begin / kTokens * kTokens; first < end; first += kTokens) {
        const bool sees_some = has_rows && first <= warp_last + side && first + kTokens - 1 >= warp_first - side;
        float scores[kWarpRows];
        const unsigned char* keys = stream.next<kKeys>(first);
        if (sees_some) {
            score(scores, queries + warp_row * HEAD_DIM, keys);
            const int token = first + lane;
#pragma unroll
            for (int r = 0; r < kWarpRows; ++r) {
                const int distance = token - tile.position(warp_row + r);
                float x = scores[r] * scale;
                if (reach > 0 && token < length) x += bias[distance];
                if (token >= length || distance > side || distance < -side) x = -infinity();
                scores[r] = weigh(x, largest[r], totals[r], sums[r]);
            }
        }
        const unsigned char* values = stream.next<kValues>(first);
        if (sees_some) accumulate(sums, scores, values);
    }
    store_outputs(out, tile, KV_DTYPE, sums, largest, totals, nullptr);
}

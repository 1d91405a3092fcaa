// A head of one token: q is normed and rotated in place; k, normed and rotated, and v are written to the paged cache in
// its dtype. A group of lanes holds a head, 8 numbers per lane. Numbers are rounded to Act after the norm and after the
// rotation, as between separate operations.

#pragma once

#include "common/reduce.cuh"
#include "common/values.cuh"

__device__ __forceinline__ void round_to_act(float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = to_float(from_float<Act>(x[j]));
}

// The norm of the heads of q and k: none; RMS norm, with weights [head_dim]; layer norm, with weights [heads, head_dim].
enum HeadNorm { kNoHeadNorm, kRmsHeadNorm, kLayerHeadNorm };

// x is chunk `lane` of a head spread over `lanes` lanes; lanes past the head's end hold zeros.
__device__ __forceinline__ void norm_head(float (&x)[8], const float* weight, int lane, int lanes, int head_dim,
                                          float eps, bool is_centred) {
    if (is_centred) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += x[j];
        const float mean = reduce_lanes(sum, lanes, Sum{}) / float(head_dim);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = lane * 8 < head_dim ? x[j] - mean : 0.0f;
    }
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += x[j] * x[j];
    const float scale = 1.0f / sqrtf(reduce_lanes(squares, lanes, Sum{}) / float(head_dim) + eps);
    if (lane * 8 >= head_dim) return;
    float weights[8];
    load8(weight + lane * 8, weights);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = x[j] * scale * weights[j];
    round_to_act(x);
}

// cos_sin: the position's [cos | sin]. Pair i is (x[i], x[i + rotary_dim / 2]). rotary_dim: a multiple of 16.
__device__ __forceinline__ void rotate_head(float (&x)[8], const float* cos_sin, int lane, int lanes, int rotary_dim) {
    const int half = rotary_dim / 16;  // chunks
    const bool first = lane < half;
    const int partner = (first ? lane + half : lane - half) & (lanes - 1);
    float other[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) other[j] = __shfl_sync(kWholeWarp, x[j], partner, lanes);
    if (lane >= 2 * half) return;
    float cosine[8], sine[8];
    const int pair = (first ? lane : lane - half) * 8;
    load8(cos_sin + pair, cosine);
    load8(cos_sin + rotary_dim / 2 + pair, sine);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = x[j] * cosine[j] + (first ? -other[j] : other[j]) * sine[j];
    round_to_act(x);
}

// GGML's q8_0 of the 32 numbers in 4 lanes: d = largest |x| / 127, and x / d rounded to the nearest integer, ties away
// from zero. Returns d; NaN if a number is not finite. Products and differences are not fused, to match the CPU's bits.
__device__ __forceinline__ float quantise(float (&x)[8]) {
    unsigned top = 0;  // bits of |x|: as integers they order finite numbers, infinity and NaN
#pragma unroll
    for (int j = 0; j < 8; ++j) top = max(top, __float_as_uint(x[j]) & 0x7fffffffu);
    top = reduce_lanes(top, 4, Largest{});
    const float scale = top < 0x7f800000u ? __uint_as_float(top) / 127.0f : __uint_as_float(0x7fc00000u);
    const float inverse = scale >= 1.17549435e-38f ? 1.0f / scale : 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float scaled = __fmul_rn(x[j], inverse), whole = truncf(scaled), rest = __fadd_rn(scaled, -whole);
        x[j] = whole + truncf(rest + rest);
    }
    return scale;
}

// Where heads are read and written, the same for all of a launch. query_rope, key_rope [turns, rotary_dim]; layer: start
// of the layer's pages; page_table [max_slots, max_pages]. rotary_dim 0: no rotation.
struct HeadStore {
    const float *q_norm, *k_norm, *query_rope, *key_rope;
    unsigned char* layer;
    const int* page_table;
    int max_pages, page_size, num_heads, num_kv_heads, head_dim, rotary_dim, head_norm;
    float eps;

    __device__ __forceinline__ int all_heads() const { return num_heads + 2 * num_kv_heads; }
    // Lanes of a group.
    __device__ __forceinline__ int lanes() const { return head_dim <= 64 ? 8 : head_dim <= 128 ? 16 : 32; }

    // source: the lane's numbers of the head, read if `present`; turn: the token's row of the ropes. All lanes of the warp
    // call it.
    __device__ __forceinline__ void operator()(Act* source, int head, int lane, bool present, int slot, int position,
                                               int turn) const {
        const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
        float x[8] = {};
        if (present) load8(source, x);
        if (head_norm != kNoHeadNorm) {
            float normed[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) normed[j] = x[j];
            const bool is_centred = head_norm == kLayerHeadNorm;
            const int place = is_query ? head : is_value ? 0 : head - num_heads;
            const float* const weight = (is_query ? q_norm : k_norm) + (is_centred ? place * head_dim : 0);
            norm_head(normed, weight, lane, lanes(), head_dim, eps, is_centred);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = is_value ? x[j] : normed[j];
        }
        if (rotary_dim > 0) {
            float rotated[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) rotated[j] = x[j];
            const float* const rope = is_query ? query_rope : key_rope;
            rotate_head(rotated, rope + (long long)(turn) * rotary_dim, lane, lanes(), rotary_dim);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = is_value ? x[j] : rotated[j];
        }
        write(x, source, head, lane, present, slot, position);
    }

    // Write chunk `lane` of a head that is normed and rotated: back if it is a query, else to the cache.
    __device__ __forceinline__ void write(float (&x)[8], Act* source, int head, int lane, bool present, int slot,
                                          int position) const {
        const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
        if (is_query && present) store8(source, x);
#if KV_DTYPE == 2
        const float scale = quantise(x);
#endif
        if (is_query || !present) return;
        const int page = page_table[(long long)(slot) * max_pages + position / page_size], place = position % page_size;
        const int kv_head = head - num_heads - (is_value ? num_kv_heads : 0);
        const KvBlock block(layer, page, is_value, kv_head, num_kv_heads, page_size, head_dim);
        store8(block.row(place, head_dim) + lane * 8, x);
#if KV_DTYPE == 2
        if (lane % 4 == 0) block.row_scales(place, head_dim)[lane / 4] = from_float<Fp16>(scale);
#endif
    }
};

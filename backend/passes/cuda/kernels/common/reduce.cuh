// Reductions over a warp or a block, in an order that depends only on the number of threads.

#pragma once

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kMaxWarps = 32;  // of a block

// Each lane gets the result over its group of `width` lanes; width is a power of two.
template <class T, class F> __device__ __forceinline__ T reduce_lanes(T x, int width, const F& combine) {
    for (int step = width / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(kWholeWarp, x, step));
    return x;
}

// Each thread gets the result over the block. combine(x, 0) must be x. one_per_warp: kMaxWarps entries of shared
// memory, which may be reused after the next __syncthreads().
template <class T, class F> __device__ __forceinline__ T reduce_block(T x, T* one_per_warp, const F& combine) {
    const unsigned lane = threadIdx.x % 32;
    x = reduce_lanes(x, 32, combine);
    if (lane == 0) one_per_warp[threadIdx.x / 32] = x;
    __syncthreads();
    return reduce_lanes(lane < blockDim.x / 32 ? one_per_warp[lane] : T{}, 32, combine);
}

struct Sum {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
struct Largest {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a < b ? b : a; }
};

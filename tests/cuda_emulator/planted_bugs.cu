// Kernels that each have one bug if BUG is 1, and are correct if it is 0. Blocks have 64 threads.

#include "common/ptx.cuh"

__device__ __forceinline__ void barrier_unless_bug() {
    if (!BUG) __syncthreads();
}

extern "C" __global__ void missing_barrier(float* out) {
    __shared__ float numbers[64];
    numbers[threadIdx.x] = 0.0f;
    __syncthreads();
    numbers[threadIdx.x] = 1.0f;
    barrier_unless_bug();
    out[threadIdx.x] = numbers[63 - threadIdx.x];
}

extern "C" __global__ void missing_trailing_barrier(const float* in, float* out) {
    __shared__ float stage[2][64];
    float sum = 0.0f;
    stage[0][threadIdx.x] = in[threadIdx.x];
    for (int i = 0; i < 4; ++i) {
        __syncthreads();
        sum += stage[i % 2][63 - threadIdx.x];
        barrier_unless_bug();
        if (i < 3) stage[BUG ? i % 2 : (i + 1) % 2][threadIdx.x] = in[threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

// Two stages: the next tile is copied into one while the other is read. A stage is filled again only after all threads
// have read it.
extern "C" __global__ void refilled_too_early(const float* in, float* out) {
    extern __shared__ __align__(16) unsigned char tiles[];
    float* stages = reinterpret_cast<float*>(tiles);
    const auto fetch = [&](int tile) {
        if (threadIdx.x < 16) cp_async_16(stages + tile % 2 * 64 + threadIdx.x * 4, in + threadIdx.x * 4);
        cp_async_commit();
    };
    float sum = 0.0f;
    fetch(0);
    for (int tile = 0; tile < 4; ++tile) {
        if (tile < 3) fetch(tile + 1);
        if (tile < 3) cp_async_wait<1>();
        else cp_async_wait<0>();
        __syncthreads();
        sum += stages[tile % 2 * 64 + 63 - threadIdx.x];
        barrier_unless_bug();
    }
    out[threadIdx.x] = sum;
}

extern "C" __global__ void missing_warp_barrier(float* out) {
    __shared__ float numbers[64];
    numbers[threadIdx.x] = 0.0f;
    __syncthreads();
    numbers[threadIdx.x] = float(threadIdx.x);
    if (!BUG) __syncwarp();
    out[threadIdx.x] = numbers[threadIdx.x ^ 1];
}

extern "C" __global__ void shuffle_taken_for_a_barrier(float* out) {
    __shared__ float numbers[64];
    numbers[threadIdx.x] = 0.0f;
    __syncthreads();
    numbers[threadIdx.x] = float(threadIdx.x);
    const float other = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
    if (!BUG) __syncwarp();
    out[threadIdx.x] = numbers[threadIdx.x ^ 1] * other;
}

extern "C" __global__ void warp_barrier_across_warps(float* out) {
    __shared__ float numbers[64];
    numbers[threadIdx.x] = 0.0f;
    __syncthreads();
    numbers[threadIdx.x] = float(threadIdx.x);
    if (BUG) __syncwarp();
    else __syncthreads();
    out[threadIdx.x] = numbers[threadIdx.x ^ 32];
}

extern "C" __global__ void atomic_read_plainly(int* out) {
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    atomicAdd(&total, 1);
    barrier_unless_bug();
    out[threadIdx.x] = total;
}

extern "C" __global__ void two_blocks_one_word(int* out) {
    if (threadIdx.x == 0) {
        if (BUG) out[0] = out[0] + 1;
        else atomicAdd(out, 1);
    }
}

// The last block to finish adds up the results of all blocks.
extern "C" __global__ void missing_fence(float* out, unsigned* ticket) {
    __shared__ bool last;
    out[1 + blockIdx.x * 64 + threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = (BUG ? atomicAdd(ticket, 1u) : take_ticket(ticket)) == gridDim.x - 1;
        if (last) *ticket = 0;
    }
    __syncthreads();
    if (!last || threadIdx.x != 40) return;
    float sum = 0.0f;
    for (int i = 0; i < 64 * int(gridDim.x); ++i) sum += out[1 + i];
    out[0] = sum;
}

// Like missing_fence, but the bug writes the results after it takes the ticket.
extern "C" __global__ void written_after_the_fence(float* out, unsigned* ticket) {
    if (threadIdx.x > 0) return;
    if (!BUG) out[1 + blockIdx.x] = 1.0f;
    const bool last = take_ticket(ticket) == gridDim.x - 1;
    if (BUG) out[1 + blockIdx.x] = 1.0f;
    if (!last) return;
    float sum = 0.0f;
    for (int i = 0; i < int(gridDim.x); ++i) sum += out[1 + i];
    out[0] = sum;
}

extern "C" __global__ void static_array_beyond(float* out, int shift) {
    __shared__ float numbers[64];
    numbers[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = numbers[threadIdx.x + (BUG ? shift : 0)];
}

// A pointer into one variable reaches another.
extern "C" __global__ void static_pointer_beyond(float* out, int shift) {
    __shared__ float before[64], numbers[64], after[64];
    before[threadIdx.x] = numbers[threadIdx.x] = after[threadIdx.x] = 1.0f;
    __syncthreads();
    const float* pointer = numbers;
    out[threadIdx.x] = pointer[threadIdx.x + (BUG ? shift : 0)] + before[0] + after[0];
}

extern "C" __global__ void dynamic_shared_beyond(float* out) {
    extern __shared__ __align__(16) unsigned char bytes[];
    float* numbers = reinterpret_cast<float*>(bytes);
    numbers[threadIdx.x + BUG] = 1.0f;
    out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void global_read_beyond(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x + BUG]; }

extern "C" __global__ void global_write_before(float* out) {
    out[threadIdx.x] = 1.0f;
    if (threadIdx.x == 0) out[-BUG] = 1.0f;
}

extern "C" __global__ void misaligned_vector(const float* in, float* out) {
    if (threadIdx.x < 15) {
        const float4 four = *reinterpret_cast<const float4*>(in + 4 * threadIdx.x + BUG);
        out[threadIdx.x] = four.x;
    }
}

extern "C" __global__ void misaligned_copy(const float* in, float* out) {
    extern __shared__ __align__(16) unsigned char bytes[];
    if (threadIdx.x < 8) cp_async_16(bytes + 32 * threadIdx.x + 8 * BUG, in + 4 * threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    out[threadIdx.x] = 0.0f;
}

extern "C" __global__ void misaligned_matrix_row(unsigned* out) {
    __shared__ __align__(16) unsigned bytes[64 * 4];
    for (int i = 0; i < 4; ++i) bytes[threadIdx.x * 4 + i] = 0;
    __syncthreads();
    unsigned r[4];
    ldmatrix_x4(r, bytes + threadIdx.x % 32 * 4 + BUG);
    out[threadIdx.x] = r[0];
}

extern "C" __global__ void matrix_row_not_shared(const unsigned* in, unsigned* out) {
    __shared__ __align__(16) unsigned bytes[64 * 2];
    bytes[threadIdx.x] = bytes[64 + threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    unsigned r[4];
    ldmatrix_x4(r, (BUG ? in : bytes) + threadIdx.x % 32 * 4);
    out[threadIdx.x] = r[0];
}

extern "C" __global__ void divergent_barrier(float* out) {
    if (BUG && threadIdx.x < 32) {
        __syncthreads();
        out[threadIdx.x] = 1.0f;
    } else {
        __syncthreads();
        out[threadIdx.x] = 1.0f;
    }
}

extern "C" __global__ void early_exit(float* out) {
    if (BUG && threadIdx.x >= 50) return;
    __syncthreads();
    out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void lane_outside_its_mask(float* out) {
    out[threadIdx.x] = float(__ballot_sync(BUG ? 0x7fffffffu : 0xffffffffu, 1));
}

extern "C" __global__ void shuffle_from_outside_the_mask(float* out) {
    const int lane = int(threadIdx.x % 32);
    out[threadIdx.x] = 0.0f;
    if (lane < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, lane + (BUG ? 1 : 0));
}

extern "C" __global__ void lanes_that_never_come(float* out) {
    out[threadIdx.x] = 1.0f;
    if (threadIdx.x % 32 < 16) __syncwarp(BUG ? 0xffffffffu : 0x0000ffffu);
}

extern "C" __global__ void mismatched_masks(float* out) {
    const bool low = threadIdx.x % 32 < 16;
    out[threadIdx.x] = __shfl_xor_sync(BUG && low ? 0x0000ffffu | 1u << 16 : 0xffffffffu, 1.0f, 1);
}

extern "C" __global__ void copy_not_awaited(const float* in, float* out) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const float4* copied = reinterpret_cast<const float4*>(bytes);
    cp_async_16(bytes + 16 * threadIdx.x, in + 4 * (threadIdx.x % 16));
    cp_async_commit();
    if (!BUG) cp_async_wait<0>();
    out[threadIdx.x] = copied[threadIdx.x].x;
}

extern "C" __global__ void wait_too_weak(const float* in, float* out) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const float4* copied = reinterpret_cast<const float4*>(bytes);
    cp_async_16(bytes + 16 * threadIdx.x, in + 4 * (threadIdx.x % 16));
    cp_async_commit();
    cp_async_wait<BUG>();
    __syncthreads();
    out[threadIdx.x] = copied[63 - threadIdx.x].x;
    cp_async_wait<0>();
}

extern "C" __global__ void copy_read_without_barrier(const float* in, float* out) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const float4* copied = reinterpret_cast<const float4*>(bytes);
    reinterpret_cast<float4*>(bytes)[threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    __syncthreads();
    cp_async_16(bytes + 16 * threadIdx.x, in + 4 * (threadIdx.x % 16));
    cp_async_commit();
    cp_async_wait<0>();
    barrier_unless_bug();
    out[threadIdx.x] = copied[63 - threadIdx.x].x;
}

extern "C" __global__ void shared_not_initialised(float* out) {
    __shared__ float numbers[64];
    if (!BUG || threadIdx.x < 63) numbers[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = numbers[63 - threadIdx.x];
}

extern "C" __global__ void shared_kept_from_the_last_block(float* out) {
    __shared__ float number;
    if (threadIdx.x == 0 && (!BUG || blockIdx.x == 0)) number = 1.0f;
    __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = number;
}

extern "C" __global__ void const_written(const float* in, float* out) {
    out[threadIdx.x] = in[threadIdx.x];
    if (BUG) const_cast<float*>(in)[threadIdx.x] = 0.0f;
}

extern "C" __global__ void shift_too_far(int* out, int shift) { out[threadIdx.x] = 1 << (BUG ? shift : 0); }

extern "C" __global__ void sum_too_large(int* out, int a, int b) { out[threadIdx.x] = a + (BUG ? b : 0); }

// These begin before the kernel before them has ended.

extern "C" __global__ void input_read_too_early(const float* weights, const float* in, float* out) {
    const float weight = weights[threadIdx.x];
    const float early = BUG ? in[threadIdx.x] : 0.0f;
    wait_for_earlier_kernels();
    out[threadIdx.x] = weight * in[threadIdx.x] + early;
}

extern "C" __global__ void input_copied_too_early(const float* weights, const float* in, float* out) {
    __shared__ __align__(16) float stage[64];
    if (threadIdx.x < 16) cp_async_16(stage + threadIdx.x * 4, (BUG ? in : weights) + threadIdx.x * 4);
    cp_async_commit();
    wait_for_earlier_kernels();
    cp_async_wait<0>();
    __syncthreads();
    out[threadIdx.x] = stage[63 - threadIdx.x] * in[threadIdx.x];
}

extern "C" __global__ void written_too_early(const float* weights, const float* in, float* out) {
    if (BUG) out[threadIdx.x] = 0.0f;
    wait_for_earlier_kernels();
    if (!BUG) out[threadIdx.x] = weights[threadIdx.x] * in[threadIdx.x];
}

extern "C" __global__ void ended_without_a_wait(const float* weights, const float* in, float* out) {
    if (BUG && threadIdx.x > 60) return;
    wait_for_earlier_kernels();
    out[threadIdx.x] = weights[threadIdx.x] * in[threadIdx.x];
}

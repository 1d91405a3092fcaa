// Kernels for sm_90a that each have one bug if BUG is 1, and are correct if it is 0. Blocks have one warpgroup.

#include "common/hopper.cuh"

constexpr int kBoxRows = 64, kBoxBytes = kBoxRows * 128;

struct Shared {
    unsigned char box[2][kBoxBytes];
    Barrier full[2], empty[2];
};

__device__ __forceinline__ Shared& shared_memory() {
    extern __shared__ __align__(1024) unsigned char shared[];
    return *reinterpret_cast<Shared*>(shared);
}

__device__ __forceinline__ void init(Shared& shared, int num_arrivals, bool fenced = true) {
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < 2; ++slot) {
            barrier_init(&shared.full[slot], 1);
            barrier_init(&shared.empty[slot], num_arrivals);
        }
        if (fenced) fence_stores();
    }
    __syncthreads();
}

__device__ __forceinline__ void copy(Shared& shared, const TensorMap& map, int slot, int row,
                                     int num_bytes = kBoxBytes) {
    barrier_arrive_for_bytes(&shared.full[slot], num_bytes);
    copy_box(shared.box[slot], map, row, 0, &shared.full[slot]);
}

// The kernel's shared memory, with a copy of box 0 under way.
__device__ __forceinline__ Shared& start(const TensorMap& map, int num_bytes = kBoxBytes, bool fenced = true) {
    Shared& shared = shared_memory();
    init(shared, 1, fenced);
    if (threadIdx.x == 0) copy(shared, map, 0, 0, num_bytes);
    return shared;
}

__device__ __forceinline__ float first_number(const unsigned char* box) {
    return __uint_as_float(unsigned(reinterpret_cast<const unsigned short*>(box)[threadIdx.x * 8]) << 16);
}

extern "C" __global__ void box_not_awaited(const __grid_constant__ TensorMap map, float* out) {
    Shared& shared = start(map);
    if (BUG) __syncthreads();
    else barrier_wait(&shared.full[0], 0);
    out[threadIdx.x] = first_number(shared.box[0]);
}

extern "C" __global__ void awaited_by_another_thread(const __grid_constant__ TensorMap map, float* out) {
    Shared& shared = start(map);
    if (!BUG || threadIdx.x < 64) barrier_wait(&shared.full[0], 0);
    else barrier_wait(&shared.full[1], 1);
    out[threadIdx.x] = first_number(shared.box[0]);
}

extern "C" __global__ void wrong_phase(const __grid_constant__ TensorMap map, float* out) {
    Shared& shared = start(map);
    barrier_wait(&shared.full[0], BUG);
    out[threadIdx.x] = first_number(shared.box[0]);
}

extern "C" __global__ void too_many_bytes_announced(const __grid_constant__ TensorMap map, float* out) {
    Shared& shared = start(map, BUG ? kBoxBytes + 16 : kBoxBytes);
    barrier_wait(&shared.full[0], 0);
    out[threadIdx.x] = first_number(shared.box[0]);
}

extern "C" __global__ void too_many_arrivals(const __grid_constant__ TensorMap map, float* out) {
    Shared& shared = start(map);
    if (BUG && threadIdx.x == 0) barrier_arrive_for_bytes(&shared.full[0], 0);
    barrier_wait(&shared.full[0], 0);
    out[threadIdx.x] = first_number(shared.box[0]);
}

extern "C" __global__ void block_ends_before_its_copy(const __grid_constant__ TensorMap map, float* out) {
    Shared& shared = start(map);
    if (!BUG) barrier_wait(&shared.full[0], 0);
    out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void barrier_not_fenced(const __grid_constant__ TensorMap map, float* out) {
    Shared& shared = start(map, kBoxBytes, !BUG);
    barrier_wait(&shared.full[0], 0);
    out[threadIdx.x] = first_number(shared.box[0]);
}

// The last warp copies four boxes through two slots, and the others use them.
extern "C" __global__ void slot_filled_too_early(const __grid_constant__ TensorMap map, float* out) {
    Shared& shared = shared_memory();
    init(shared, 96);
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) {
        const int slot = i % 2;
        if (threadIdx.x < 96) {
            barrier_wait(&shared.full[slot], i / 2 & 1);
            sum += first_number(shared.box[slot]);
            barrier_arrive(&shared.empty[slot]);
        } else if (threadIdx.x == 96) {
            if (!BUG) barrier_wait(&shared.empty[slot], (i / 2 & 1) ^ 1);
            copy(shared, map, slot, i);
        }
    }
    out[threadIdx.x] = sum;
}

// The last warp stores to a box after it has come, before the others use it.
extern "C" __global__ void stored_without_a_fence(const __grid_constant__ TensorMap map, float* out) {
    Shared& shared = shared_memory();
    init(shared, 1);
    if (threadIdx.x < 64) *reinterpret_cast<uint4*>(shared.box[0] + threadIdx.x * 128) = make_uint4(0, 0, 0, 0);
    if (!BUG) fence_stores();
    __syncthreads();
    if (threadIdx.x == 0) copy(shared, map, 0, 0);
    barrier_wait(&shared.full[0], 0);
    out[threadIdx.x] = first_number(shared.box[0]);
}

extern "C" __global__ void some_threads_meet_at_two_places(const __grid_constant__ TensorMap, float* out) {
    if (BUG && threadIdx.x < 32) sync_some<96>(1);
    else if (threadIdx.x < 96) sync_some<96>(1);
    out[threadIdx.x] = 1.0f;
}

// The halves of the block take turns to add to a number of shared memory, three each. passes: how often the first one
// passes its second turn on.
__device__ __forceinline__ void take_turns(float* out, bool waits, int passes) {
    float& sum = *reinterpret_cast<float*>(shared_memory().box[0]);
    const int half = int(threadIdx.x / 64);
    if (threadIdx.x == 0) sum = 0.0f;
    __syncthreads();
    if (half == 1) arrive_some<128>(2);
    for (int turn = 0; turn < 3; ++turn) {
        if (waits) sync_some<128>(2 + half);
        if (threadIdx.x % 64 == 0) sum = sum * 2.0f + float(half);
        for (int i = turn == 1 && half == 0 ? passes : 1; i > 0; --i) arrive_some<128>(3 - half);
    }
    __syncthreads();
    out[threadIdx.x] = sum;
}
extern "C" __global__ void turn_not_passed_on(const __grid_constant__ TensorMap, float* out) {
    take_turns(out, true, BUG ? 0 : 1);
}
extern "C" __global__ void turn_passed_on_twice(const __grid_constant__ TensorMap, float* out) {
    take_turns(out, true, BUG ? 2 : 1);
}
extern "C" __global__ void turn_not_awaited(const __grid_constant__ TensorMap, float* out) {
    take_turns(out, !BUG, 1);
}

// ---- Products: out = the first 8 rows of box 0 · box 1, both as [64, 16] at the start of their rows ----

struct Product {
    Shared& shared;
    float sums[8][4] = {};
    unsigned a[4];

    __device__ __forceinline__ explicit Product(const TensorMap& map) : shared(start(map)) {
        barrier_wait(&shared.full[0], 0);
        for (int i = 0; i < 4; ++i) a[i] = 0x3f803f80u;
    }

    __device__ __forceinline__ unsigned long long values() const { return matrix_descriptor(shared.box[0], 16, 1024); }

    __device__ __forceinline__ void multiply(unsigned long long descriptor) {
        wgmma_fence();
        wgmma_by_rows(sums, a, descriptor);
        wgmma_commit();
    }
};

extern "C" __global__ void registers_not_fenced(const __grid_constant__ TensorMap map, float* out) {
    Product product(map);
    if (!BUG) wgmma_fence();
    wgmma_by_rows(product.sums, product.a, product.values());
    wgmma_commit();
    wgmma_wait<0>();
    out[threadIdx.x] = product.sums[0][0];
}

extern "C" __global__ void product_never_awaited(const __grid_constant__ TensorMap map, float* out) {
    Product product(map);
    wgmma_fence();
    wgmma_by_rows(product.sums, product.a, product.values());
    if (!BUG) wgmma_commit();
    wgmma_wait<0>();
    out[threadIdx.x] = product.sums[0][0];
}

extern "C" __global__ void part_of_a_warpgroup_multiplies(const __grid_constant__ TensorMap map, float* out) {
    Product product(map);
    if (!BUG || threadIdx.x < 96) {
        product.multiply(product.values());
        wgmma_wait<0>();
    }
    out[threadIdx.x] = product.sums[0][0];
}

extern "C" __global__ void rows_not_at_1024(const __grid_constant__ TensorMap map, float* out) {
    Product product(map);
    product.multiply(product.values() + (BUG ? 128 / 16 : 1024 / 16));
    wgmma_wait<0>();
    out[threadIdx.x] = product.sums[0][0];
}

// Three warpgroups. 168 registers of each thread at the launch are shared out; with the bug 170 are.
extern "C" __global__ void too_many_registers(const __grid_constant__ TensorMap, float* out) {
    if (threadIdx.x >= 128) {
        take_registers<224>();
        return;
    }
    keep_registers<(BUG ? 64 : 56)>();
    out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void operands_stored_without_a_fence(const __grid_constant__ TensorMap map, float* out) {
    Product product(map);
    if (threadIdx.x < 8) *reinterpret_cast<uint4*>(product.shared.box[0] + threadIdx.x * 16) = make_uint4(0, 0, 0, 0);
    if (!BUG) fence_stores();
    __syncthreads();
    product.multiply(product.values());
    wgmma_wait<0>();
    out[threadIdx.x] = product.sums[0][0];
}

// The slot is given back while products still read it.
extern "C" __global__ void released_during_a_product(const __grid_constant__ TensorMap map, float* out) {
    Product product(map);
    Barrier* empty = &product.shared.empty[0];
    const auto release = [&] {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    };
    if (threadIdx.x == 0) barrier_init(&product.shared.empty[1], 4);
    __syncthreads();
    empty = &product.shared.empty[1];
    product.multiply(product.values());
    if (BUG) release();
    else wgmma_wait<0>(), release();
    if (threadIdx.x == 0) {
        barrier_wait(empty, 0);
        copy(product.shared, map, 0, 1);
    }
    wgmma_wait<0>();
    barrier_wait(&product.shared.full[0], 1);
    out[threadIdx.x] = product.sums[0][0];
}

// Two bugs of values: the results differ.
extern "C" __global__ void accumulators_read_too_early(const __grid_constant__ TensorMap map, float* out) {
    Product product(map);
    product.multiply(product.values());
    if (BUG) out[threadIdx.x] = product.sums[0][0];
    wgmma_wait<0>();
    if (!BUG) out[threadIdx.x] = product.sums[0][0];
}

extern "C" __global__ void wrong_distance_of_rows(const __grid_constant__ TensorMap map, float* out) {
    Product product(map);
    product.multiply(matrix_descriptor(product.shared.box[0], 16, BUG ? 2048 : 1024));
    wgmma_wait<0>();
    out[threadIdx.x] = product.sums[0][0];
}

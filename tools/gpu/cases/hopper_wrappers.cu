// Kernels that call each wrapper of hopper.cuh, for checks against references. One warpgroup each.

#include "common/hopper.cuh"

constexpr int kRowBytes = 128, kGroupBytes = 8 * kRowBytes;

// Store 8 numbers as 16-byte chunk `chunk` of a row, in a matrix that is swizzled in rows of 128 bytes.
__device__ __forceinline__ void store_chunk(unsigned char* matrix, int row, int chunk, const unsigned short* from) {
    unsigned short* to = reinterpret_cast<unsigned short*>(matrix + row * kRowBytes + (chunk ^ row % 8) * 16);
    for (int i = 0; i < 8; ++i) to[i] = from[i];
}

// Row and column of number i of block j of a thread's accumulators.
__device__ __forceinline__ int acc_row(int i) {
    return int(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) + i / 2 * 8;
}
__device__ __forceinline__ int acc_column(int j, int i) { return j * 8 + int(threadIdx.x % 4) * 2 + i % 2; }

// a [64, 16] and b [N, 16] row by row, in bf16; out [64, N] += a · bᵀ, twice: in two groups. In shared memory they are
// the third 32 bytes of their rows.
template <int N>
__device__ __forceinline__ void multiply_shared(const unsigned short* a, const unsigned short* b, float* out) {
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char *const as = shared, *const bs = shared + 64 * kRowBytes;
    const int row = int(threadIdx.x);
    for (int chunk = 0; chunk < 2; ++chunk) {
        if (row < 64) store_chunk(as, row, 4 + chunk, a + row * 16 + chunk * 8);
        if (row < N) store_chunk(bs, row, 4 + chunk, b + row * 16 + chunk * 8);
    }
    fence_stores();
    __syncthreads();
    float acc[N / 8][4], twice[N / 8][4];
    for (int j = 0; j < N / 8; ++j) {
        for (int i = 0; i < 4; ++i) acc[j][i] = out[acc_row(i) * N + acc_column(j, i)], twice[j][i] = 0.0f;
    }
    const unsigned long long first = matrix_descriptor(as, 16, kGroupBytes) + 4;
    const unsigned long long second = matrix_descriptor(bs, 16, kGroupBytes) + 4;
    pin(acc);
    wgmma_fence();
    wgmma_shared(acc, first, second, true);
    wgmma_commit();
    wgmma_shared(twice, first, second, false);
    wgmma_commit();
    wgmma_wait<1>();
    pin(acc);
    wgmma_wait<0>();
    pin(twice);
    for (int j = 0; j < N / 8; ++j) {
        for (int i = 0; i < 4; ++i) out[acc_row(i) * N + acc_column(j, i)] = acc[j][i] + twice[j][i];
    }
}
extern "C" __global__ void __launch_bounds__(128, 1)
    multiply_shared_64(const unsigned short* a, const unsigned short* b, float* out) {
    multiply_shared<64>(a, b, out);
}
extern "C" __global__ void __launch_bounds__(128, 1)
    multiply_shared_128(const unsigned short* a, const unsigned short* b, float* out) {
    multiply_shared<128>(a, b, out);
}

// a [64, 32] and b [32, N] row by row, in bf16; out [64, N] = a · b.
template <int N>
__device__ __forceinline__ void multiply_rows(const unsigned short* a, const unsigned short* b, float* out) {
    extern __shared__ __align__(1024) unsigned char values[];
    constexpr int kHalfBytes = 32 * kRowBytes;  // 64 columns
    for (int i = int(threadIdx.x); i < 32 * N / 8; i += 128) {
        const int row = i / (N / 8), chunk = i % (N / 8);
        store_chunk(values + chunk / 8 * kHalfBytes, row, chunk % 8, b + row * N + chunk * 8);
    }
    fence_stores();
    __syncthreads();
    float acc[N / 8][4];
    unsigned as[2][4];
    for (int step = 0; step < 2; ++step) {
        for (int i = 0; i < 4; ++i) {
            const int row = acc_row(i % 2 * 2), column = step * 16 + acc_column(i / 2, 0);
            as[step][i] = a[row * 32 + column] | unsigned(a[row * 32 + column + 1]) << 16;
        }
    }
    for (int j = 0; j < N / 8; ++j) {
        for (int i = 0; i < 4; ++i) acc[j][i] = 0.0f;
    }
    const unsigned long long matrix = matrix_descriptor(values, kHalfBytes, kGroupBytes);
    pin(acc);
    wgmma_fence();
    wgmma_by_rows(acc, as[0], matrix);
    wgmma_by_rows(acc, as[1], matrix + 2 * kGroupBytes / 16);
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);
    for (int j = 0; j < N / 8; ++j) {
        for (int i = 0; i < 4; ++i) out[acc_row(i) * N + acc_column(j, i)] = acc[j][i];
    }
}

extern "C" __global__ void __launch_bounds__(128, 1)
    multiply_64(const unsigned short* a, const unsigned short* b, float* out) {
    multiply_rows<64>(a, b, out);
}
extern "C" __global__ void __launch_bounds__(128, 1)
    multiply_80(const unsigned short* a, const unsigned short* b, float* out) {
    multiply_rows<80>(a, b, out);
}
extern "C" __global__ void __launch_bounds__(128, 1)
    multiply_96(const unsigned short* a, const unsigned short* b, float* out) {
    multiply_rows<96>(a, b, out);
}
extern "C" __global__ void __launch_bounds__(128, 1)
    multiply_128(const unsigned short* a, const unsigned short* b, float* out) {
    multiply_rows<128>(a, b, out);
}

// Copy a box of box_rows to shared memory three times, with half of the block waiting each time, and write its bytes.
extern "C" __global__ void __launch_bounds__(128, 1)
    copy(const __grid_constant__ TensorMap map, unsigned char* out, int row, int column, int box_rows) {
    extern __shared__ __align__(1024) unsigned char shared[];
    Barrier* full = reinterpret_cast<Barrier*>(shared + box_rows * kRowBytes);
    Barrier* empty = full + 1;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init(empty, 64);
        fence_stores();
    }
    __syncthreads();
    if (threadIdx.x >= 64) {
        for (unsigned turn = 0; threadIdx.x == 64 && turn < 3; ++turn) {
            barrier_wait(empty, (turn & 1) ^ 1);
            barrier_arrive_for_bytes(full, box_rows * kRowBytes);
            copy_box(shared, map, row, column, full);
        }
    } else {
        for (unsigned turn = 0; turn < 3; ++turn) {
            barrier_wait(full, turn & 1);
            for (int i = int(threadIdx.x); i < box_rows * kRowBytes; i += 64) {
                out[turn * box_rows * kRowBytes + i] = shared[i];
            }
            sync_some<64>(1);
            barrier_arrive(empty);
        }
    }
}

// Warps take turns to note that it is theirs: out [8] becomes the warps' numbers, twice.
extern "C" __global__ void __launch_bounds__(128, 1) take_turns(int* out) {
    extern __shared__ int place[];
    const int warp = int(threadIdx.x / 32);
    if (threadIdx.x == 0) *place = 0;
    __syncthreads();
    if (warp == 3) arrive_some<64>(4);
    for (int turn = 0; turn < 2; ++turn) {
        sync_some<64>(4 + warp);
        if (threadIdx.x % 32 == 0) out[(*place)++] = warp;
        if (turn == 0 || warp < 3) arrive_some<64>(4 + (warp + 1) % 4);
    }
}

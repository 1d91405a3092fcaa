// Macro: WGMMA_FP16, if products are of fp16 and not of bf16.
//
// Inline PTX that only sm_90a has, with an emulation of each instruction for the CPU like that of ptx.cuh: barriers in
// shared memory, copies of boxes of a tensor (TMA), and matrix products of a warpgroup (wgmma).
//
// Copies and products access shared memory through another proxy than loads and stores. They see what a thread stored
// if that thread calls fence_stores between its stores and the barrier after them.

#pragma once

#include "common/ptx.cuh"

using Barrier = unsigned long long;

#ifndef CUSIM

// A tensor in global memory, and the boxes in which it is copied; see device/tensor_maps.py.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// ---- Matrix products of a warpgroup: four warps, the first of them a multiple of four ----
// All its threads call together. A product is under way from its call until wgmma_wait; until then, nothing may access
// its accumulators and a, or change its shared memory. wgmma_fence stands between any other access to these registers
// and the next product. A warp has 16 rows, in the fragments of mma.m16n8k16, one for each 8 columns.
//
// Matrices in shared memory are passed as their descriptors: a [64, 16] as rows along k, b as rows along k too, one for
// each column, or "by rows": one row along the columns for each k.

#ifdef WGMMA_FP16
#define WGMMA_TYPES "f16.f16"
#else
#define WGMMA_TYPES "bf16.bf16"
#endif
#define ACC8(i)                                                                                     \
    "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3]), "+f"(acc[(i) + 1][0]),      \
        "+f"(acc[(i) + 1][1]), "+f"(acc[(i) + 1][2]), "+f"(acc[(i) + 1][3])
#define ACC32(i) ACC8(i), ACC8((i) + 2), ACC8((i) + 4), ACC8((i) + 6)
#define REGISTERS_32                                                                                        \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
    "%28,%29,%30,%31"
#define REGISTERS_40 REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define REGISTERS_48 REGISTERS_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS_64                                                                                          \
    REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
                 "%55,%56,%57,%58,%59,%60,%61,%62,%63"

// acc [64, 64 or 128] = a · b, plus acc if `adds`; a and b in shared memory.
__device__ __forceinline__ void wgmma_shared(float (&acc)[16][4], unsigned long long a, unsigned long long b, bool adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPES " {" REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0; }"
                 : ACC32(0), ACC32(8)
                 : "l"(a), "l"(b), "r"(int(adds)));
}

__device__ __forceinline__ void wgmma_shared(float (&acc)[8][4], unsigned long long a, unsigned long long b, bool adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_TYPES " {" REGISTERS_32 "}, %32, %33, p, 1, 1, 0, 0; }"
                 : ACC32(0)
                 : "l"(a), "l"(b), "r"(int(adds)));
}

// acc [64, 64, 80, 96 or 128] += a · b, with a in registers and b by rows.
__device__ __forceinline__ void wgmma_by_rows(float (&acc)[8][4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_TYPES " {" REGISTERS_32
                 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : ACC32(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_by_rows(float (&acc)[10][4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n80k16.f32." WGMMA_TYPES " {" REGISTERS_40
                 "}, {%40,%41,%42,%43}, %44, 1, 1, 1, 1;"
                 : ACC32(0), ACC8(8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_by_rows(float (&acc)[12][4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32." WGMMA_TYPES " {" REGISTERS_48
                 "}, {%48,%49,%50,%51}, %52, 1, 1, 1, 1;"
                 : ACC32(0), ACC8(8), ACC8(10)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_by_rows(float (&acc)[16][4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPES " {" REGISTERS_64
                 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : ACC32(0), ACC32(8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef WGMMA_TYPES
#undef ACC8
#undef ACC32
#undef REGISTERS_32
#undef REGISTERS_40
#undef REGISTERS_48
#undef REGISTERS_64

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most N of the groups of products that this warp committed are under way.
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Let the compiler move no access to the accumulators across this call.
template <int N> __device__ __forceinline__ void pin(float (&acc)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        asm volatile("" : "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])::"memory");
    }
}

// Compute x, which is never negative, before waits that follow: ptxas moves them before all that does not need them, but
// not before a store.
__device__ __forceinline__ void finish_before(float x) {
    asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0; }" ::"f"(x), "r"(0)
                 : "memory");
}

// ---- Registers ----
// A warpgroup keeps N registers a thread, a multiple of 8, and gives back the others; or it takes more, until it has N.
// All its threads call together.

template <int N> __device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- Barriers in shared memory ----
// Those with a number, 1 to 15, need no object. A phase ends when N threads of the block, of whole warps, have called;
// only sync_some waits for that. Accesses before either call are ordered before those after sync_some.
template <int N> __device__ __forceinline__ void sync_some(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(N) : "memory");
}
template <int N> __device__ __forceinline__ void arrive_some(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(N) : "memory");
}

// A phase ends when `count` threads have arrived and all announced bytes are there; the first one has parity 0. Memory
// accesses before an arrival are ordered before those after the wait for its phase.

__device__ __forceinline__ void barrier_init(Barrier* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive, and announce bytes that copies will bring in this phase.
__device__ __forceinline__ void barrier_arrive_for_bytes(Barrier* barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(num_bytes)
                 : "memory");
}

// Wait for the end of the phase of this parity. It may be the current one or the one before.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
    unsigned is_over = 0;
    while (is_over == 0) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_over)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    }
}

// Order this thread's stores to shared memory, and barriers that it initialised, before copies and products that others
// start after a barrier.
__device__ __forceinline__ void fence_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Copies of boxes ----

// Copy the map's box whose first element is [row, column] to shared memory; elements outside the tensor become 0. The
// target is at a multiple of 1024, and its 16-byte chunks are swizzled as map says. Its bytes arrive at the barrier.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap& map, int row, int column, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared_address(shared)),
                 "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

#else  // CUSIM

using cusim::TensorMap;

__device__ __forceinline__ unsigned shared_address(const void* pointer) { return cusim::shared_offset(pointer); }

#ifdef WGMMA_FP16
constexpr cusim::Number kWgmmaNumber = cusim::Number::kFp16;
#else
constexpr cusim::Number kWgmmaNumber = cusim::Number::kBf16;
#endif
template <int N>
inline void wgmma_shared(float (&acc)[N][4], unsigned long long a, unsigned long long b, bool adds, CUSIM_HERE) {
    static_assert(N == 8 || N == 16);
    cusim::wgmma(kWgmmaNumber, &acc[0][0], 8 * N, nullptr, a, b, false, adds, here);
}
template <int N>
inline void wgmma_by_rows(float (&acc)[N][4], const unsigned (&a)[4], unsigned long long b, CUSIM_HERE) {
    static_assert(N == 8 || N == 10 || N == 12 || N == 16);
    cusim::wgmma(kWgmmaNumber, &acc[0][0], 8 * N, a, 0, b, true, true, here);
}
inline void wgmma_fence() { cusim::wgmma_fence(); }
inline void wgmma_commit() { cusim::wgmma_commit(); }
template <int N> inline void wgmma_wait() { cusim::wgmma_wait(N); }
template <int N> inline void pin(float (&)[N][4]) {}
inline void finish_before(float) {}

template <int N> inline void keep_registers() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256);
    cusim::set_registers(N);
}
template <int N> inline void take_registers() { keep_registers<N>(); }

template <int N> inline void sync_some(int barrier, CUSIM_HERE) { cusim::sync_some(barrier, N, here); }
template <int N> inline void arrive_some(int barrier, CUSIM_HERE) { cusim::arrive_some(barrier, N, here); }
inline void barrier_init(Barrier* barrier, int count, CUSIM_HERE) { cusim::barrier_init(barrier, count, here); }
inline void barrier_arrive(Barrier* barrier, CUSIM_HERE) { cusim::barrier_arrive(barrier, 0, here); }
inline void barrier_arrive_for_bytes(Barrier* barrier, int num_bytes, CUSIM_HERE) {
    cusim::barrier_arrive(barrier, num_bytes, here);
}
inline void barrier_wait(Barrier* barrier, unsigned parity, CUSIM_HERE) { cusim::barrier_wait(barrier, parity, here); }
inline void fence_stores() { cusim::fence_stores(); }
inline void copy_box(void* shared, const TensorMap& map, int row, int column, Barrier* barrier, CUSIM_HERE) {
    cusim::copy_box(shared, map, row, column, barrier, here);
}

#endif

// Describe a matrix in shared memory that is swizzled in rows of 128 bytes: its 8 rows after the next 8 are at
// stride_bytes, and the next 64 columns of a matrix by rows at leading_bytes. Addresses and distances are multiples of
// 16; groups of 8 rows begin at multiples of 1024. PTX ISA, "Matrix Descriptor Format".
__device__ __forceinline__ unsigned long long matrix_descriptor(const void* start, int leading_bytes,
                                                                int stride_bytes) {
    constexpr unsigned long long kSwizzle128 = 1ull << 62;
    const auto encoded = [](unsigned bytes) { return (unsigned long long)((bytes & 0x3ffff) >> 4); };
    return encoded(shared_address(start)) | encoded(leading_bytes) << 16 | encoded(stride_bytes) << 32 | kSwizzle128;
}

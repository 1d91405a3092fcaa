// The functions that emulated kernel code calls. A CUDA thread is a fiber; all fibers run on one CPU thread. A fiber
// runs until it ends or waits for others (at a barrier or in a warp operation); then the next ready fiber runs.

#pragma once

#include <stddef.h>
#include <stdint.h>

struct uint3 {
    unsigned x, y, z;
};

namespace cusim {

// The source location of a call in a kernel.
struct Here {
    const char* file;
    int line;

    static constexpr Here caller(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

// The last parameter of a function that needs its caller's location.
#define CUSIM_HERE cusim::Here here = cusim::Here::caller()

// The environment of the running thread. There is one object, because only one thread runs at a time.
struct Machine {
    uint3 thread_index;  // of the running thread, like the members below
    unsigned lane;
    uint3 block_index, block_dim, grid_dim;
    unsigned char* dynamic_shared;
};
extern Machine machine;

// ---- Synchronization of threads ----

enum class Vote { kNone, kOr, kAnd, kCount };

// __syncthreads, and its forms that combine a predicate of all threads.
int block_barrier(Vote vote, bool predicate, Here here);

enum class WarpCall {
    kShuffle,
    kBallot,
    kAny,
    kAll,
    kMatch,
    kAdd,
    kMin,
    kMax,
    kAnd,
    kOr,
    kXor,
    kSync,
    kMma,
    kLdmatrix
};

// The lanes in mask exchange values. from_lane: in a shuffle, the lane whose value this thread gets.
uint64_t warp_call(WarpCall call, unsigned mask, uint64_t value, int from_lane, Here here);

enum class Number { kBf16, kFp16 };

// mma.m16n8k16, and ldmatrix of four matrices, with the fragments of the PTX manual.
void mma(Number number, float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Here here);
void ldmatrix(unsigned (&registers)[4], bool transposed, const void* row, Here here);

// ---- cp.async ----

void async_copy(void* shared, const void* source, int bytes, int source_bytes, Here here);
void async_commit();
void async_wait(int allowed_groups);

// ---- sm_90a: barriers in shared memory, copies of boxes, products of warpgroups; see kernels/common/hopper.cuh ----

// The layout must match launcher.py.
struct TensorMap {
    const unsigned char* base;
    long long rows, columns, row_bytes;
    int box_rows, box_columns;
    char rest[88];
};

// Of an address in dynamic shared memory: its place in it, and the address where 16 bytes are if rows of 128 bytes are
// swizzled.
unsigned shared_offset(const void* address);
unsigned char* swizzled_128(unsigned char* address);

void barrier_init(unsigned long long* barrier, int count, Here here);
void barrier_arrive(unsigned long long* barrier, int num_bytes, Here here);
void barrier_wait(unsigned long long* barrier, unsigned parity, Here here);
void sync_some(int barrier, int count, Here here);
void arrive_some(int barrier, int count, Here here);
void fence_stores();
void copy_box(void* shared, const TensorMap& map, int row, int column, unsigned long long* barrier, Here here);

// a: registers, or null for a_descriptor.
void wgmma(Number number, float* accumulators, int columns, const unsigned* a, uint64_t a_descriptor,
           uint64_t b_descriptor, bool b_by_rows, bool adds, Here here);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int allowed_groups);
void set_registers(int number);

// ---- Programmatic dependent launch ----

void wait_for_earlier_kernels();

// ---- Memory order; only the checker uses it ----

void fence();
// Call before an atomic access of the given bytes. site: the address of the accessing code in the kernel.
void before_atomic(const void* address, size_t bytes, const void* site);

// ---- Numbers ----

uint16_t float_to_half(float x);
float half_to_float(uint16_t x);

// ---- Kernels, as the compiled library exports them ----

enum class Kind : int { kPointer, kFloat, kInteger, kOther };

struct Parameter {
    Kind kind;
    int bytes;
    bool read_only;        // a pointer to const
    Kind pointed_kind;     // of pointers
    int pointed_bytes;     // 0: void
};

// A static __shared__ variable. The layout must match build.py.
struct SharedVariable {
    const char* name;
    char* address;
    size_t bytes;
};

struct Module {
    const char *image, *image_end;    // the whole library in memory
    char *shared, *shared_end;        // all static __shared__ variables, with gaps between them
    const SharedVariable *variables, *variables_end;
};

struct Kernel {
    void (*run)(void** arguments);  // runs one thread
    const Parameter* parameters;
    int num_parameters;
    const char* parameter_names;  // comma-separated
    int max_threads;              // __launch_bounds__, or 0
    Module module;
};

}  // namespace cusim

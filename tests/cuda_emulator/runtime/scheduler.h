// The threads of the running block, and the choice of the next one to run.

#pragma once

#include <string>
#include <vector>

#include "runtime.h"

namespace cusim {

enum class Status : int { kReady, kAtBarrier, kInWarpCall, kInWarpgroupCall, kDone };

// What a warp call uses comes first, in one cache line.
struct alignas(64) Thread {
    void* stack_pointer;  // null: has not started
    Here here;            // the call in which it waits, or last waited
    WarpCall call;
    unsigned mask;
    uint64_t value;
    uint64_t result;  // of that call
    int16_t from_lane, lane, warp, number;
    Status status;
    int stack;  // index of its stack
    uint3 index;
    bool has_waited;  // for earlier kernels
};

// The order in which threads and blocks run. A kernel's results must not depend on it.
enum class Order : int { kForward, kReverse, kRandom };

extern std::vector<Thread> threads;  // of the running block
extern Thread* current;              // null outside of kernels
extern int num_alive;
extern Order order;

// Run the block's threads to their end, or to the first failure.
void run_block(const Kernel& kernel, void** arguments);

// Let other threads run until one of them makes this one ready.
void wait(Status status);
void make_ready(Thread& thread);
// Let the ready threads run before this one continues; does nothing in the forward order, to save the switch.
void yield_to_ready();

// End the launch with an error that names block and thread. Never returns to the kernel.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The error of the last launch; empty if it succeeded.
extern std::string error;

void prepare_threads(int num_threads, uint3 block_dim, Order order, uint64_t seed);
uint64_t random_number();

// Whether address is in the fibers' stacks.
bool on_a_stack(uintptr_t address);

}  // namespace cusim

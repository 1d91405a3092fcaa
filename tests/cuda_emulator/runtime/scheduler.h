// The threads of the block that runs, and the choice of which of them runs next.

#pragma once

#include <string>
#include <vector>

#include "runtime.h"

namespace cusim {

enum class Status { kReady, kAtBarrier, kInWarpCall, kDone };

struct Thread {
    void* stack_pointer;  // null: has not begun
    int stack;            // which one it runs on
    int number, lane, warp;
    uint3 index;
    Status status;
    Here here;  // the call that it waits in, or waited in last
    WarpCall call;
    unsigned mask;
    uint64_t value;
    int from_lane;
    uint64_t result;  // of that call
};

// In which threads and blocks run: what a kernel computes must not depend on it.
enum class Order : int { kForward, kReverse, kRandom };

extern std::vector<Thread> threads;  // of the block
extern Thread* current;              // null outside of kernels
extern int num_alive;
extern Order order;

// Runs the block's threads to their ends, or to the first failure.
void run_block(const Kernel& kernel, void** arguments);

// Lets the other threads run until one of them makes this one ready.
void wait(Status status);
void make_ready(Thread& thread);
// Lets those that are ready run before this one goes on, except in the forward order, which saves the switch.
void yield_to_ready();

// Ends the launch with an error that names block and thread. Never returns to the kernel.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Outside of kernels, where there is no thread to name.
extern std::string error;

void prepare_threads(int num_threads, uint3 block_dim, Order order, uint64_t seed);
uint64_t random_number();

// Whether address lies in the memory that fibers use as their stacks.
bool on_a_stack(uintptr_t address);

}  // namespace cusim

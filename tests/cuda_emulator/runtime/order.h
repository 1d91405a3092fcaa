// Happens-before: which accesses of other threads are ordered before an access. Within a block, barriers order
// accesses. Between blocks, it takes a fence and an atomic on some address in the first block, then an atomic on the
// same address and a fence in the second. Shuffles order nothing.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace cusim {

// A point in a thread's execution.
struct Moment {
    uint32_t block;  // counted over all launches from 1; 0 is never
    uint32_t epoch;  // number of block barriers so far
    uint32_t clock;  // the thread's own clock, which orders its moments within an epoch
    int thread;
};

void begin_ordered_launch();
void begin_ordered_block(int num_threads);

uint32_t current_block();
Moment now(int thread);
// The moment of an atomic access: that of the fence before it, which it publishes, if there was one.
Moment moment_of_atomic(int thread);
bool ordered_before(const Moment& earlier, int thread);
bool in_this_launch(const Moment& moment);

void order_block();
void order_warp(int warp, unsigned mask);
void order_fence(int thread);
void order_atomic(int thread, uintptr_t address);

}  // namespace cusim

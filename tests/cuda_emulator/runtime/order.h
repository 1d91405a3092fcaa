// Happens-before: which accesses of other threads an access may rely on. Within a block, barriers order; between
// blocks, a fence, an atomic on some address, an atomic on it by the other block, and a fence there. Shuffles order
// nothing.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace cusim {

// A point in a thread's life.
struct Moment {
    uint32_t block;  // counted over all launches, from 1; 0: never
    uint32_t epoch;  // barriers that the block has met at
    uint32_t clock;  // the thread's own: moments of one epoch are ordered by it
    int thread;
};

void begin_ordered_launch();
void begin_ordered_block(int num_threads);

uint32_t current_block();
Moment now(int thread);
// The moment to which an atomic access counts: that of the fence that makes it publish, if there was one.
Moment moment_of_atomic(int thread);
bool ordered_before(const Moment& earlier, int thread);
bool in_this_launch(const Moment& moment);

void order_block();
void order_warp(int warp, unsigned mask);
void order_fence(int thread);
void order_atomic(int thread, uintptr_t address);

}  // namespace cusim

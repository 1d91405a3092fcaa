// Happens-before: which accesses of other threads are ordered before an access. Within a block, barriers order
// accesses; those in shared memory order only the threads that arrive and wait. Between blocks, it takes a fence and an
// atomic on some address in the first block, then an atomic on the same address and a fence in the second. Shuffles
// order nothing.

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

// Of all threads of a block, and of the copies that arrive at each of its barriers: what happened before.
struct Clocks {
    std::vector<uint32_t> threads, copies;
    std::vector<int> known;  // releases of other blocks
};

void begin_ordered_launch();
void begin_ordered_block(int num_threads);

uint32_t current_block();
Moment now(int thread);
// The moment of an atomic access: that of the fence before it, which it publishes, if there was one.
Moment moment_of_atomic(int thread);
bool ordered_before(const Moment& earlier, int thread);
bool in_this_launch(const Moment& moment);

// The moment of copy `clock` that arrives at a barrier in shared memory. It happened before what follows a wait for
// that barrier, and before nothing else.
Moment moment_of_copy(int barrier, uint32_t clock);
void note_copy(Clocks& clocks, const Moment& copy);
// An arrival at a barrier in shared memory, and the end of the wait.
void order_release(int thread, Clocks& into);
void order_acquire(int thread, const Clocks& from);
// A fence between a thread's own accesses and those of copies and of products of warpgroups.
void order_proxy_fence(int thread);
// Whether such a fence followed the access and is ordered before the thread.
bool proxy_fenced(const Moment& earlier, int thread);

void order_block();
void order_warp(int warp, unsigned mask);
void order_fence(int thread);
void order_atomic(int thread, uintptr_t address);

}  // namespace cusim

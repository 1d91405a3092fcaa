// The checking mode: receives every memory access of kernel code, and every call that orders accesses.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

#include "order.h"
#include "runtime.h"

namespace cusim {

struct Thread;

enum class Sort { kShared, kBuffer, kReadOnlyBuffer };

// Memory that must contain an access as a whole: an argument's bytes, a __shared__ variable, dynamic shared memory.
struct Region {
    uintptr_t begin, end;
    Sort sort;
    std::string name;
};

// All regions of a launch. Accesses to other memory are errors.
struct Memory {
    std::vector<Region> regions;
    Module module;
};

// An asynchronous copy is a write that may land at any time between its begin and the end of its thread's wait.
// Products of warpgroups read shared memory, and copies of boxes write it, asynchronously.
enum class Access { kRead, kWrite, kAtomic, kCopyBegins, kCopyLands, kProductReads, kBoxBegins, kBoxLands };

// If `enabled` is false, nothing is checked until the next launch.
void begin_checked_launch(const Memory& memory, bool enabled);
void begin_checked_block();

// site: the return address of the accessing call in the kernel's code.
void check_access(const void* address, size_t bytes, Access access, const void* site);
void check_access_of(Thread& thread, const void* address, size_t bytes, Access access, const void* site);
// Check that an instruction's address is in shared memory, at a multiple of alignment. Runs in all modes.
void check_shared(const void* address, size_t bytes, size_t alignment, const char* instruction);

// A copy of a box begins and lands. moment: of the copy.
void box_begins(const void* target, size_t bytes, const Moment& moment, const void* site);
void box_lands(const void* target, size_t bytes, const Moment& moment);
// Fail unless a fence for copies follows an access and is ordered before the current thread.
void check_fenced(const Moment& earlier, const char* what, const void* site);
Moment moment_now();

// Arrivals and waits; see order.h.
void release_to(Clocks& clocks);
void acquire_for(const Thread& thread, const Clocks& clocks);
void on_proxy_fence();
void on_block_barrier();
void on_warp_barrier(int warp, unsigned mask);

}  // namespace cusim

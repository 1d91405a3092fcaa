// What the checking mode sees: every access of kernel code to memory, and every call that orders accesses.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

#include "runtime.h"

namespace cusim {

struct Thread;

enum class Sort { kShared, kBuffer, kReadOnlyBuffer };

// What an access may lie in, as a whole: an argument's memory, a __shared__ variable, the dynamic shared memory.
struct Region {
    uintptr_t begin, end;
    Sort sort;
    std::string name;
};

// All of a launch. Accesses to any other memory are errors.
struct Memory {
    std::vector<Region> regions;
    Module module;
};

// A copy is a write that may land at any time from where it begins to where its thread has waited for it.
enum class Access { kRead, kWrite, kAtomic, kCopyBegins, kCopyLands };

// Without `enabled`, nothing is checked until the next launch.
void begin_checked_launch(const Memory& memory, bool enabled);
void begin_checked_block();

// site: an address in the kernel's code, behind the call that made the access.
void check_access(const void* address, size_t bytes, Access access, const void* site);
void check_access_of(Thread& thread, const void* address, size_t bytes, Access access, const void* site);
// That an instruction's address lies in shared memory, at a multiple of alignment; checked in both modes.
void check_shared(const void* address, size_t bytes, size_t alignment, const char* instruction);

void on_block_barrier();
void on_warp_barrier(int warp, unsigned mask);

}  // namespace cusim

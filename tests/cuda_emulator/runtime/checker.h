// What the checking mode sees: every access of kernel code to memory, and every call that orders accesses.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

#include "runtime.h"

namespace cusim {

struct Thread;

// An argument's memory.
struct Buffer {
    uintptr_t begin, end;
    bool read_only;  // the kernel takes it as const, and as nothing else
    std::string name;
};

// Bytes of the launch's memory. Accesses to any other memory are errors.
struct Memory {
    std::vector<Buffer> buffers;
    uintptr_t dynamic_shared, dynamic_shared_end;
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
// That address lies in shared memory, as an instruction needs; checked in both modes.
void check_shared(const void* address, size_t bytes, const char* instruction);

void on_block_barrier();
void on_warp_barrier(int warp, unsigned mask);

}  // namespace cusim

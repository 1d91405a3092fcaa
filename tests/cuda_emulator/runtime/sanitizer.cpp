// The checking mode compiles kernels with the thread and undefined-behaviour sanitizers, but does not link their
// runtimes. This file defines the functions that such code calls: they pass every access to the checker and every fault
// to the launcher.

#include <stdio.h>
#include <stdlib.h>

#include "checker.h"
#include "scheduler.h"

using cusim::Access;
using cusim::check_access;

#define HERE __builtin_return_address(0)

#define ACCESS(BYTES)                                                                                            \
    void __tsan_read##BYTES(void* address) { check_access(address, BYTES, Access::kRead, HERE); }                \
    void __tsan_write##BYTES(void* address) { check_access(address, BYTES, Access::kWrite, HERE); }              \
    void __tsan_unaligned_read##BYTES(void* address) { check_access(address, BYTES, Access::kRead, HERE); }      \
    void __tsan_unaligned_write##BYTES(void* address) { check_access(address, BYTES, Access::kWrite, HERE); }    \
    void __tsan_volatile_read##BYTES(void* address) { check_access(address, BYTES, Access::kRead, HERE); }       \
    void __tsan_volatile_write##BYTES(void* address) { check_access(address, BYTES, Access::kWrite, HERE); }

// The first member of the data of every handler: the source location.
struct SourcePlace {
    const char* file;
    unsigned line, column;
};

[[noreturn]] static void fault(void* data, const char* what) {
    const SourcePlace* place = static_cast<SourcePlace*>(data);
    if (cusim::current) cusim::fail("%s at %s:%u", what, place->file, place->line);
    fprintf(stderr, "%s at %s:%u, outside of any kernel\n", what, place->file, place->line);
    abort();
}

extern "C" {

ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void __tsan_read_range(void* address, size_t bytes) { check_access(address, bytes, Access::kRead, HERE); }
void __tsan_write_range(void* address, size_t bytes) { check_access(address, bytes, Access::kWrite, HERE); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void __ubsan_handle_out_of_bounds_abort(void* data, void*) { fault(data, "out-of-bounds array index"); }
void __ubsan_handle_type_mismatch_v1_abort(void* data, void*) { fault(data, "misaligned or null pointer"); }
void __ubsan_handle_shift_out_of_bounds_abort(void* data, void*, void*) { fault(data, "shift out of range"); }
void __ubsan_handle_add_overflow_abort(void* data, void*, void*) { fault(data, "overflow of a signed sum"); }
void __ubsan_handle_sub_overflow_abort(void* data, void*, void*) { fault(data, "overflow of a signed difference"); }
void __ubsan_handle_mul_overflow_abort(void* data, void*, void*) { fault(data, "overflow of a signed product"); }
void __ubsan_handle_negate_overflow_abort(void* data, void*) { fault(data, "overflow of a signed negation"); }
void __ubsan_handle_divrem_overflow_abort(void* data, void*, void*) { fault(data, "division by zero, or overflow"); }

}  // extern "C"

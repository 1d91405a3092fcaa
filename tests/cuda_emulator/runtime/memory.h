// Loads and stores with hints, atomics and fences.

#pragma once

#include "language.h"

template <class T> static inline T __ldg(const T* address) { return *address; }
template <class T> static inline T __ldca(const T* address) { return *address; }
template <class T> static inline T __ldcg(const T* address) { return *address; }
template <class T> static inline T __ldcs(const T* address) { return *address; }
template <class T> static inline T __ldlu(const T* address) { return *address; }
template <class T, class V> static inline void __stcg(T* address, V value) { *address = value; }
template <class T, class V> static inline void __stcs(T* address, V value) { *address = value; }

static inline void __threadfence() { cusim::fence(); }
static inline void __threadfence_block() {}
static inline void __threadfence_system() { cusim::fence(); }

// Fibers do not preempt each other, so a plain read and write is atomic. The checker receives it as one access.
#define CUSIM_ATOMIC(NAME, NEW_VALUE)                                                                              \
    template <class T>                                                                                             \
    __attribute__((no_sanitize("thread"), noinline)) static T NAME(T* address, std::common_type_t<T> value) {     \
        cusim::before_atomic(address, sizeof(T), __builtin_return_address(0));                                    \
        const T old = *address;                                                                                   \
        *address = (NEW_VALUE);                                                                                   \
        return old;                                                                                               \
    }
CUSIM_ATOMIC(atomicAdd, old + value)
CUSIM_ATOMIC(atomicSub, old - value)
CUSIM_ATOMIC(atomicExch, value)
CUSIM_ATOMIC(atomicMax, old < value ? value : old)
CUSIM_ATOMIC(atomicMin, value < old ? value : old)
CUSIM_ATOMIC(atomicOr, old | value)
CUSIM_ATOMIC(atomicAnd, old & value)
CUSIM_ATOMIC(atomicXor, old ^ value)
CUSIM_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
CUSIM_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)

template <class T>
__attribute__((no_sanitize("thread"), noinline)) static T atomicCAS(T* address, std::common_type_t<T> expected,
                                                                    std::common_type_t<T> value) {
    cusim::before_atomic(address, sizeof(T), __builtin_return_address(0));
    const T old = *address;
    if (old == expected) *address = value;
    return old;
}

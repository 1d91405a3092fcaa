// Barriers and warp operations.

#pragma once

#include "language.h"

static inline void __syncthreads(CUSIM_HERE) { cusim::block_barrier(cusim::Vote::kNone, false, here); }
static inline int __syncthreads_or(int predicate, CUSIM_HERE) {
    return cusim::block_barrier(cusim::Vote::kOr, predicate != 0, here);
}
static inline int __syncthreads_and(int predicate, CUSIM_HERE) {
    return cusim::block_barrier(cusim::Vote::kAnd, predicate != 0, here);
}
static inline int __syncthreads_count(int predicate, CUSIM_HERE) {
    return cusim::block_barrier(cusim::Vote::kCount, predicate != 0, here);
}

static inline void __syncwarp(unsigned mask = 0xffffffffu, CUSIM_HERE) {
    cusim::warp_call(cusim::WarpCall::kSync, mask, 0, 0, here);
}

namespace cusim {

template <class T> inline uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> inline T from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T> inline T shuffle(unsigned mask, T value, int from_lane, Here here) {
    return from_bits<T>(warp_call(WarpCall::kShuffle, mask, to_bits(value), from_lane, here));
}

// A shuffle splits the warp into parts of width lanes; this thread's part is [part_start, part_start + width).
inline int part_start(int width) { return int(machine.lane) & ~(width - 1); }

template <class T> inline T reduce(WarpCall call, unsigned mask, T value, Here here) {
    return T(warp_call(call, mask, uint64_t(int64_t(value)), 0, here));
}

}  // namespace cusim

template <class T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, CUSIM_HERE) {
    return cusim::shuffle(mask, value, cusim::part_start(width) | (lane & (width - 1)), here);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CUSIM_HERE) {
    const int me = int(cusim::machine.lane), from = me ^ lanes;
    return cusim::shuffle(mask, value, from >= cusim::part_start(width) + width ? me : from, here);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUSIM_HERE) {
    const int me = int(cusim::machine.lane), from = me + int(delta);
    return cusim::shuffle(mask, value, from >= cusim::part_start(width) + width ? me : from, here);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUSIM_HERE) {
    const int me = int(cusim::machine.lane), from = me - int(delta);
    return cusim::shuffle(mask, value, from < cusim::part_start(width) ? me : from, here);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, CUSIM_HERE) {
    return unsigned(cusim::warp_call(cusim::WarpCall::kBallot, mask, predicate != 0, 0, here));
}
static inline int __any_sync(unsigned mask, int predicate, CUSIM_HERE) {
    return int(cusim::warp_call(cusim::WarpCall::kAny, mask, predicate != 0, 0, here));
}
static inline int __all_sync(unsigned mask, int predicate, CUSIM_HERE) {
    return int(cusim::warp_call(cusim::WarpCall::kAll, mask, predicate != 0, 0, here));
}
template <class T> inline unsigned __match_any_sync(unsigned mask, T value, CUSIM_HERE) {
    return unsigned(cusim::warp_call(cusim::WarpCall::kMatch, mask, cusim::to_bits(value), 0, here));
}

// T is int or unsigned, as in CUDA.
template <class T> inline T __reduce_add_sync(unsigned mask, T value, CUSIM_HERE) {
    return cusim::reduce(cusim::WarpCall::kAdd, mask, value, here);
}
template <class T> inline T __reduce_min_sync(unsigned mask, T value, CUSIM_HERE) {
    return cusim::reduce(cusim::WarpCall::kMin, mask, value, here);
}
template <class T> inline T __reduce_max_sync(unsigned mask, T value, CUSIM_HERE) {
    return cusim::reduce(cusim::WarpCall::kMax, mask, value, here);
}
template <class T> inline T __reduce_and_sync(unsigned mask, T value, CUSIM_HERE) {
    return cusim::reduce(cusim::WarpCall::kAnd, mask, value, here);
}
template <class T> inline T __reduce_or_sync(unsigned mask, T value, CUSIM_HERE) {
    return cusim::reduce(cusim::WarpCall::kOr, mask, value, here);
}
template <class T> inline T __reduce_xor_sync(unsigned mask, T value, CUSIM_HERE) {
    return cusim::reduce(cusim::WarpCall::kXor, mask, value, here);
}

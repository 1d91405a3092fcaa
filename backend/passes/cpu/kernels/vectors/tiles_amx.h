// The tile layer for AMX: matrix registers of the CPU. Included by tiles.h.

#pragma once

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Asks the kernel for this process's permission to use tile registers. Returns 0 or an errno.
inline int request_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
}

inline void load_tile_config(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }

// Empty tile registers cost nothing when the system switches threads.
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int Tile> void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(Tile)); }

template <int Tile> void load_tile(const void* p, i64 row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(Tile) : "memory");
}

template <int Tile> void store_tile(void* p, i64 row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(Tile) : "memory");
}

// C += A × B, where rows of A and rows of B are 16 pairs of bf16.
template <int C, int A, int B> void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace

// Which rows a block of an experts' product multiplies.

#pragma once

#include "products/product_tiles.cuh"
#include "common/reduce.cuh"

struct GroupTile {
    int expert, first, num_rows;  // num_rows is 0 behind the last tile
};

// The groups are cut into tiles of kTileRows rows; a tile has rows of one expert. ends [num_experts]: where each group
// ends. All lanes of the warp get the same tile.
__device__ __forceinline__ GroupTile find_tile(const int* ends, int num_experts, int number) {
    const int lane = threadIdx.x % 32;
    int tiles_before = 0;
    for (int base = 0; base < num_experts; base += 32) {
        const int expert = base + lane;
        const int begin = expert > 0 && expert < num_experts ? ends[expert - 1] : 0;
        const int end = expert < num_experts ? ends[expert] : begin;
        const int num_tiles = (end - begin + kTileRows - 1) / kTileRows;
        int through = num_tiles;  // the sum up to this lane
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(kWholeWarp, through, step);
            if (lane >= step) through += other;
        }
        const unsigned reached = __ballot_sync(kWholeWarp, tiles_before + through > number);
        if (reached) {
            const int owner = __ffs(reached) - 1;
            const int earlier = tiles_before + __shfl_sync(kWholeWarp, through - num_tiles, owner);
            const int first = __shfl_sync(kWholeWarp, begin, owner) + (number - earlier) * kTileRows;
            return {base + owner, first, min(kTileRows, __shfl_sync(kWholeWarp, end, owner) - first)};
        }
        tiles_before += __shfl_sync(kWholeWarp, through, 31);
    }
    return {0, 0, 0};
}

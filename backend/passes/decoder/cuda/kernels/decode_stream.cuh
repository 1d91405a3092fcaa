// Streams a warp's tiles of a chunk through shared memory: keys and values of every NUM_WARPS-th tile, K V K V …, in a
// ring that belongs to the warp, so that no warp waits for another.

#pragma once

#include "decode_items.cuh"
#include "decode_tiles.cuh"

struct TileStream {
    // The same for all items.
    unsigned char* ring;  // of this warp, RING_TILES tiles
    unsigned char* layer;
    const int* page_table;
    int max_pages, page_shift, num_kv_heads;

    // Of the chunk: tokens in [begin, end) are visible; the warp's tiles begin at tokens first, first + stride, …
    const int* row_pages;
    int begin, end, first, num_tiles;
    const unsigned char* keys;  // of the head, in page 0
    int half_page_bytes;        // from a page's keys to its values, and on to the next page's keys
    int pages;             // lane i: the page of run i of the 32 runs that find_pages looked up last
    int copied;            // tiles copied; keys and values count separately
    int copy_at, read_at;  // indices into the ring

    static constexpr int kStride = NUM_WARPS * kTileTokens;

    __device__ __forceinline__ TileStream(unsigned char* ring, unsigned char* layer, const int* page_table,
                                          int max_pages, int page_shift, int num_kv_heads)
        : ring(ring), layer(layer), page_table(page_table), max_pages(max_pages), page_shift(page_shift),
          num_kv_heads(num_kv_heads) {}

    // Set the chunk and load its page numbers.
    __device__ __forceinline__ void open(const Item& item, const Span& span, int head) {
        row_pages = page_table + static_cast<long long>(item.slot) * max_pages;
        const KvBlock key_block(layer, 0, 0, head, num_kv_heads, 1 << page_shift, HEAD_DIM);
        const KvBlock value_block(layer, 0, 1, head, num_kv_heads, 1 << page_shift, HEAD_DIM);
        keys = reinterpret_cast<const unsigned char*>(key_block.numbers);
        half_page_bytes = int(reinterpret_cast<const unsigned char*>(value_block.numbers) - keys);
        begin = span.begin;
        const int start = span.start(item.chunk);
        end = min(start + span.chunk_tokens, item.length);
        first = start + static_cast<int>(threadIdx.x / 32) * kTileTokens;
        num_tiles = max(end - first + kStride - 1, 0) / kStride;
        pages = find_pages(0);
    }

    __device__ __forceinline__ void start() {
        copied = copy_at = read_at = 0;
        for (int i = 0; i < RING_TILES - 1; ++i) copy();
    }

    // Return the next tile, valid until the next call. The whole warp calls.
    __device__ __forceinline__ const unsigned char* next() {
        cp_async_wait<RING_TILES - 2>();
        __syncwarp();  // all lanes' copies have arrived, and all lanes have read the tile that is overwritten next
        copy();
        const unsigned char* tile = ring + read_at * kTileBytes;
        read_at = read_at + 1 == RING_TILES ? 0 : read_at + 1;
        return tile;
    }

    __device__ __forceinline__ int token(int tile) const { return first + tile * kStride; }

  private:
    __device__ __forceinline__ int find_pages(int first_tile) const {
        const int lane = threadIdx.x % 32;
        const int at = token(first_tile + lane / kTileRuns) + lane % kTileRuns * kRunTokens;
        return at < end ? row_pages[at >> page_shift] : 0;
    }

    __device__ __forceinline__ void copy() {
        constexpr int kTilesOfPages = 32 / kTileRuns;
        const int tile = copied / 2, which = copied % 2;
        if (tile < num_tiles) {
            if (which == 0 && tile > 0 && tile % kTilesOfPages == 0) pages = find_pages(tile);
            unsigned char* target = ring + copy_at * kTileBytes;
#pragma unroll
            for (int run = 0; run < kTileRuns; ++run) {
                const int page = __shfl_sync(0xffffffffu, pages, tile % kTilesOfPages * kTileRuns + run);
                const unsigned char* block = keys + static_cast<long long>(2 * page + which) * half_page_bytes;
                copy_run(target, run, block, 1 << page_shift, token(tile) + run * kRunTokens, end);
            }
        }
        cp_async_commit();
        ++copied;
        copy_at = copy_at + 1 == RING_TILES ? 0 : copy_at + 1;
    }
};

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
    int begin, end, first, kv_head;
    int pages;             // lane i: the page of run i of the 32 runs that find_pages looked up last
    unsigned copied;  // tiles copied; keys and values count separately
    int copy_at;  // index into the ring of the next tile to copy; the one after it is the next to read

    static constexpr int kStride = NUM_WARPS * kTileTokens;

    __device__ __forceinline__ TileStream(unsigned char* ring, unsigned char* layer, const int* page_table,
                                          int max_pages, int page_shift, int num_kv_heads)
        : ring(ring), layer(layer), page_table(page_table), max_pages(max_pages), page_shift(page_shift),
          num_kv_heads(num_kv_heads) {}

    // Set the chunk and load its page numbers.
    __device__ __forceinline__ void open(const Item& item, const Span& span, int head) {
        row_pages = page_table + static_cast<long long>(item.slot) * max_pages;
        kv_head = head;
        begin = span.begin;
        const int start = span.start(item.chunk);
        end = min(start + span.chunk_tokens, item.length);
        first = start + static_cast<int>(threadIdx.x / 32) * kTileTokens;
        pages = find_pages(0);
    }

    __device__ __forceinline__ void start() {
        copied = copy_at = 0;
#pragma unroll 1
        for (int i = 0; i < RING_TILES - 1; ++i) copy(i & 1);
    }

    // Return the next tile, valid until the next call; which: 0 keys, 1 values, in turn. The whole warp calls.
    __device__ __forceinline__ unsigned char* next(int which) {
        cp_async_wait<RING_TILES - 2>();
        __syncwarp();  // all lanes' copies have arrived, and all lanes have read the tile that is overwritten next
        copy(which + RING_TILES - 1 & 1);
        return ring + copy_at * kTileBytes;
    }

    __device__ __forceinline__ int token(unsigned tile) const { return first + tile * kStride; }

  private:
    // See KvBlock.
    __device__ __forceinline__ int block_bytes() const { return (kRowBytes + kScaleRowBytes) << page_shift; }

    __device__ __forceinline__ int find_pages(int first_tile) const {
        const int lane = threadIdx.x % 32;
        const int at = token(first_tile + lane / kTileRuns) + lane % kTileRuns * kRunTokens;
        return at < end ? row_pages[at >> page_shift] : 0;
    }

    __device__ __forceinline__ void copy(int which) {
        constexpr unsigned kTilesOfPages = 32 / kTileRuns;
        const unsigned tile = copied >> 1;
        if (which == 0 && tile > 0 && tile % kTilesOfPages == 0) pages = find_pages(tile);
        int page[kTileRuns];  // before the branch: there the compiler knows that the lanes are together
#pragma unroll
        for (int run = 0; run < kTileRuns; ++run)
            page[run] = __shfl_sync(0xffffffffu, pages, tile % kTilesOfPages * kTileRuns + run);
        if (token(tile) < end) {
            unsigned char* target = ring + copy_at * kTileBytes;
#pragma unroll
            for (int run = 0; run < kTileRuns; ++run) {
                const int block = (2 * page[run] + which) * num_kv_heads + kv_head;
                const unsigned char* source = layer + block * static_cast<long long>(block_bytes());
                copy_run(target, run, source, 1 << page_shift, token(tile) + run * kRunTokens, end);
            }
        }
        cp_async_commit();
        ++copied;
        copy_at = copy_at + 1 == RING_TILES ? 0 : copy_at + 1;
    }
};

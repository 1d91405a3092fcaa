// Streams a warp's tiles through shared memory: keys and values of every NUM_WARPS-th tile of a chunk, K V K V …, then
// those of the block's next chunk, in a ring that belongs to the warp. So no warp waits for another, and while a block
// merges the results of one chunk, the tiles of the next are on their way.

#pragma once

#include "decode/decode_items.cuh"
#include "decode/decode_tiles.cuh"

struct TileStream {
    // The chunk after the one that is copied. Each warp has its own, because a warp takes it when it needs it.
    struct Queued {
        Item item;
        int kv_head;  // -1: there is none
    };

    // The same for all items.
    unsigned char* ring;  // of this warp, RING_TILES tiles
    unsigned char* layer;
    const int* page_table;
    Queued& queued;
    int max_pages, page_shift, num_kv_heads, window, max_chunks, shortest_chunk;

    // The chunk that is read: tokens in [begin, end) are visible; the warp's tiles begin at tokens first, first + stride, …
    int begin, end, first;
    int read_at;  // index into the ring of the next tile to read

    // The chunk that is copied: this one, or already the next.
    const int* row_pages;
    int copy_end, copy_first, kv_head;
    int pages;             // lane i: the page of run i of the 32 runs that find_pages looked up last
    unsigned copied;       // tiles of this chunk; keys and values count separately
    int copy_at;           // index into the ring of the next tile to copy
    int queued_pages;      // like pages, of the queued chunk
    bool has_queued = false;

    static constexpr int kStride = NUM_WARPS * kTileTokens;

    __device__ __forceinline__ TileStream(unsigned char* ring, unsigned char* layer, const int* page_table,
                                          Queued& queued, int max_pages, int page_shift, int num_kv_heads, int window,
                                          int max_chunks, int shortest_chunk)
        : ring(ring), layer(layer), page_table(page_table), queued(queued), max_pages(max_pages),
          page_shift(page_shift), num_kv_heads(num_kv_heads), window(window), max_chunks(max_chunks),
          shortest_chunk(shortest_chunk) {}

    // Begin with a block's first chunk.
    __device__ __forceinline__ void open(const Queued& chunk) {
        queue(chunk);
        take();
        read_at = copy_at = 0;
        fill();
    }

    // Name the chunk after the one that is copied, and look its pages up. None may be queued.
    __device__ __forceinline__ void queue(const Queued& chunk) {
        const Item item = chunk.item;
        __syncwarp();  // all lanes have read the last one
        if (threadIdx.x % 32 == 0) queued = chunk;
        __syncwarp();
        const Span span(item.length, window, max_chunks, shortest_chunk);
        const int start = span.start(item.chunk);
        queued_pages = find_pages(page_table + static_cast<long long>(item.slot) * max_pages, own_first(start),
                                  chunk_end(span, start, item.length), 0);
        has_queued = true;
    }

    // Read this chunk from now on; all tiles of the one before have been read.
    __device__ __forceinline__ void read(const Item& item, const Span& span) {
        const int start = span.start(item.chunk);
        begin = span.begin;
        end = chunk_end(span, start, item.length);
        first = own_first(start);
    }

    // All tiles of a chunk have been read: copy the next one, the queued one, if that has not begun. Returns it.
    __device__ __forceinline__ Queued advance() {
        if (has_queued) take();
        return queued;
    }

    // Copy until the ring is full: to be called after a chunk was queued.
    __device__ __forceinline__ void fill() {
#pragma unroll 1
        for (int i = (copy_at - read_at + RING_TILES) % RING_TILES; i < RING_TILES - 1; ++i) copy(i & 1);
    }

    // Return the next tile, valid until the next call; which: 0 keys, 1 values, in turn. The whole warp calls.
    __device__ __forceinline__ unsigned char* next(int which) {
        cp_async_wait<RING_TILES - 2>();
        __syncwarp();  // all lanes' copies have arrived, and all lanes have read the tile that is overwritten next
        copy(which + RING_TILES - 1 & 1);
        unsigned char* tile = ring + read_at * kTileBytes;
        read_at = following(read_at);
        return tile;
    }

    // The tile that was read last, whose memory is free until `next`.
    __device__ __forceinline__ unsigned char* last_read() const {
        return ring + (read_at == 0 ? RING_TILES - 1 : read_at - 1) * kTileBytes;
    }

    __device__ __forceinline__ int token(unsigned tile) const { return first + tile * kStride; }

  private:
    __device__ __forceinline__ static int following(int at) { return at + 1 == RING_TILES ? 0 : at + 1; }
    __device__ __forceinline__ static int own_first(int start) {
        return start + static_cast<int>(threadIdx.x / 32) * kTileTokens;
    }
    __device__ __forceinline__ static int chunk_end(const Span& span, int start, int length) {
        return min(start + span.chunk_tokens, length);
    }

    // See KvBlock.
    __device__ __forceinline__ int block_bytes() const { return (kRowBytes + kScaleRowBytes) << page_shift; }

    // own: the warp's first token.
    __device__ __forceinline__ int find_pages(const int* row, int own, int stop, int first_tile) const {
        const int lane = threadIdx.x % 32;
        const int at = own + (first_tile + lane / kTileRuns) * kStride + lane % kTileRuns * kRunTokens;
        return at < stop ? row[at >> page_shift] : 0;
    }

    __device__ __forceinline__ void take() {
        const Item item = queued.item;
        const Span span(item.length, window, max_chunks, shortest_chunk);
        const int start = span.start(item.chunk);
        row_pages = page_table + static_cast<long long>(item.slot) * max_pages;
        copy_end = chunk_end(span, start, item.length);
        copy_first = own_first(start);
        kv_head = queued.kv_head;
        pages = queued_pages;
        copied = 0;
        has_queued = false;
    }

    // Copy the next tile, if there is one. Every call makes one group of copies, which may be empty: so at least
    // RING_TILES - 2 groups follow that of a tile when it is read.
    __device__ __forceinline__ void copy(int which) {
        constexpr unsigned kTilesOfPages = 32 / kTileRuns;
        if (which == 0) {
            if (has_queued && copy_first + static_cast<int>(copied >> 1) * kStride >= copy_end) take();
            const unsigned tile = copied >> 1;
            if (tile > 0 && tile % kTilesOfPages == 0) pages = find_pages(row_pages, copy_first, copy_end, tile);
        }
        const unsigned tile = copied >> 1;
        const int at = copy_first + static_cast<int>(tile) * kStride;
        int page[kTileRuns];  // before the branch: there the compiler knows that the lanes are together
#pragma unroll
        for (int run = 0; run < kTileRuns; ++run)
            page[run] = __shfl_sync(0xffffffffu, pages, tile % kTilesOfPages * kTileRuns + run);
        if (at < copy_end) {
            unsigned char* target = ring + copy_at * kTileBytes;
#pragma unroll
            for (int run = 0; run < kTileRuns; ++run) {
                const int block = (2 * page[run] + which) * num_kv_heads + kv_head;
                const unsigned char* source = layer + block * static_cast<long long>(block_bytes());
                copy_run(target, run, source, 1 << page_shift, at + run * kRunTokens, copy_end);
            }
            ++copied;
            copy_at = following(copy_at);
        }
        cp_async_commit();
    }
};

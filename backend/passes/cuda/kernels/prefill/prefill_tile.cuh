// Shared by the prefill attention kernels: the queries of a block, and the stream of keys and values to shared memory.
//
// A step row of n tokens has n · group query rows for one kv head, numbered token · group + head of the group. A tile
// has up to NUM_ROWS of them, in order. Tiles of keys and values begin at multiples of their size, counted from
// position 0. So a query row sees the same tiles in the same order, wherever its own tile begins.
//
// Macro SEES_AHEAD: tokens of pictures see tokens behind them too.

#pragma once

#include "common/reduce.cuh"
#include "common/sinks.cuh"
#include "common/values.cuh"

#ifndef SEES_AHEAD
#define SEES_AHEAD 0
#endif

// The position, in chunks, of 16-byte chunk `chunk` of row `row` in a tile with CHUNKS chunks per row. It is permuted
// so that the same chunk of 8 rows falls into different banks.
template <int CHUNKS> __device__ __forceinline__ unsigned swizzled(unsigned row, unsigned chunk) {
    constexpr unsigned kSpan = (CHUNKS & -CHUNKS) < 8 ? (CHUNKS & -CHUNKS) : 8;
    return row * CHUNKS + (chunk ^ (row / (8 / kSpan) & (kSpan - 1)));
}

// Parameters of a launch that all its blocks share.
struct PrefillStep {
    const int* page_table;
    const int* context_lens;
    const int* query_starts;
    const int* slots;
    const int* tiles;  // [tiles, 4]: step row, first query row; the last two: see prefill_attention.cu
    int max_pages;     // in a row of page_table
    int group;
    int window;  // 2^30 for none
    const int* visible_ends;  // [tokens] position behind the last that each sees; read if SEES_AHEAD

    // Whether the tile's row has no slot. It then has no sequence, and its output does not change.
    __device__ __forceinline__ bool is_padding(int tile) const { return slots[tiles[4 * tile]] < 0; }
};

template <int NUM_ROWS> struct QueryTile {
    int first;         // query row of the tile's row 0
    int num_rows;      // rows of the tile that exist
    int group;
    int first_token;   // of the step row, in the step
    int context;       // position of that token
    const int* pages;  // of its sequence
    int length;        // of the sequence, with the step row's tokens
    const int* ends;   // visible_ends of the step row; not of rows that are computed whole

    __device__ __forceinline__ QueryTile(const PrefillStep& step, int tile) : group(step.group) {
        const int row = step.tiles[4 * tile];
        first = step.tiles[4 * tile + 1];
        first_token = step.query_starts[row];
        ends = SEES_AHEAD ? step.visible_ends + first_token : nullptr;
        context = step.context_lens[row];
        pages = step.page_table + (long long)(step.slots[row]) * step.max_pages;
        const int num_tokens = step.query_starts[row + 1] - first_token;
        num_rows = min(NUM_ROWS, num_tokens * group - first);
        length = context + num_tokens;
    }

    // Of rows that are computed whole: a token's position is its place in its row. tile: step row, first query row.
    __device__ __forceinline__ QueryTile(const int* row_starts, const int* tile)
        : first(tile[1]), group(1), first_token(row_starts[tile[0]]), context(0), pages(nullptr), ends(nullptr) {
        length = row_starts[tile[0] + 1] - first_token;
        num_rows = min(NUM_ROWS, length - first);
    }

    // Rows that do not exist have the position of the last one.
    __device__ __forceinline__ int position(int row) const {
        return context + unsigned(first + min(row, num_rows - 1)) / unsigned(group);
    }

    // The last position that the row sees. It does not fall from row to row.
    __device__ __forceinline__ int last_seen(int row) const {
        return SEES_AHEAD ? ends[position(row) - context] - 1 : position(row);
    }

    __device__ __forceinline__ int head_of_group(int row) const { return int(unsigned(first + row) % unsigned(group)); }

    // Index of the row's head in an array [tokens, heads_per_token]; this kv head's query heads begin at first_head.
    __device__ __forceinline__ long long head(int row, int heads_per_token, int first_head) const {
        const int token = int(unsigned(first + row) / unsigned(group)), head_of_group = first + row - token * group;
        return (long long)(first_token + token) * heads_per_token + first_head + head_of_group;
    }
};

// What a block computes at a time: a tile of queries for one kv head.
struct Task {
    int kv_head, num_kv_heads;
    int tile;
};
// With a block for each.
__device__ __forceinline__ Task task_of_block() { return {int(blockIdx.x), int(gridDim.x), int(blockIdx.y)}; }

// 8 numbers of an array of dtype act (0 fp32, 1 bf16, 2 fp16).
__device__ __forceinline__ void load8_act(const void* array, long long index, int act, float (&x)[8]) {
    if (act == 0) {
        load8(static_cast<const float*>(array) + index, x);
    } else if (act == 1) {
        load8(static_cast<const Bf16*>(array) + index, x);
    } else {
        load8(static_cast<const Fp16*>(array) + index, x);
    }
}

// Finds the keys and values of one sequence's tokens in the cache of one layer, for one kv head. Tokens in [begin, end)
// are found. A lane of each warp holds the page of every 32nd run of 16 tokens, which lie in one page; the pages of the
// next 512 tokens are loaded before they are needed.
struct KvPlaces {
    static constexpr int kRun = 16, kSpan = 32 * kRun;  // tokens

    const unsigned char* first;  // the keys of page 0
    const int* table;            // the sequence's pages
    int page_bits;               // 2^page_bits tokens in a page
    int half_page_bytes;         // from a page's keys to its values
    int begin, end;
    int pages, next_pages;  // of the lane's run in the span of 512 tokens that copies have reached, and in the next one

    __device__ __forceinline__ KvPlaces(unsigned char* layer, const Task& task, const int* table, int page_bits,
                                        int begin, int end)
        : table(table), page_bits(page_bits), begin(begin), end(end) {
        const int page_size = 1 << page_bits;
        const KvBlock keys(layer, 0, 0, task.kv_head, task.num_kv_heads, page_size, HEAD_DIM);
        const KvBlock values(layer, 0, 1, task.kv_head, task.num_kv_heads, page_size, HEAD_DIM);
        first = reinterpret_cast<const unsigned char*>(keys.numbers);
        half_page_bytes = int(reinterpret_cast<const unsigned char*>(values.numbers) - first);
        pages = find_pages(begin / kSpan * kSpan);
        next_pages = find_pages(begin / kSpan * kSpan + kSpan);
    }

    // Call before copies of keys of the tile whose tokens begin at `position`, with tiles in order.
    __device__ __forceinline__ void move_to(int position) {
        if (position % kSpan != 0 || position <= begin) return;
        pages = next_pages;
        next_pages = find_pages(position + kSpan);
    }

    // The block that contains a position of that span; page 0 if the position is not in [begin, end). which: 0 keys, 1
    // values. All lanes call together.
    __device__ __forceinline__ const unsigned char* block(int position, int which) const {
        const int page = __shfl_sync(kWholeWarp, pages, position / kRun);
        return first + (long long)(2 * page + which) * half_page_bytes;
    }
    __device__ __forceinline__ int place(int position) const { return position & ((1 << page_bits) - 1); }

    // The position's numbers, of a dtype without scales.
    __device__ __forceinline__ const unsigned char* numbers(int position, int which) const {
        return block(position, which) + place(position) * HEAD_DIM * int(sizeof(Kv));
    }

  private:
    __device__ __forceinline__ int find_pages(int span) const {
        const int run = span + int(threadIdx.x & 31) * kRun;
        return run + kRun > begin && run < end ? __ldg(table + (run >> page_bits)) : 0;
    }
};

// Finds them for one head and the tokens of one row in qkv [tokens, 3, heads, HEAD_DIM].
struct PackedPlaces {
    const unsigned char* first;  // the row's first query
    long long stride;            // bytes of a token's heads
    int begin, end;              // positions that may be read

    __device__ __forceinline__ PackedPlaces(const void* qkv, int first_token, int begin, int end)
        : stride((long long)(gridDim.x) * HEAD_DIM * int(sizeof(Kv))), begin(begin), end(end) {
        first = static_cast<const unsigned char*>(qkv) + first_token * 3 * stride +
                blockIdx.x * HEAD_DIM * int(sizeof(Kv));
    }

    __device__ __forceinline__ void move_to(int) {}

    __device__ __forceinline__ const unsigned char* numbers(int position, int which) const {
        return first + (position * 3ll + 1 + which) * stride;
    }
};

constexpr int kKeys = 0, kValues = 1;

// Keys and values of the sequence's positions that `places` finds, in turn, each a swizzled tile [TOKENS, HEAD_DIM] in
// which other positions are 0. Shared memory holds SLOTS tiles; copies of up to SLOTS - 1 tiles run ahead of the tile in
// use.
template <int THREADS, int TOKENS, int SLOTS, class Places> struct KvStream {
    static constexpr int kRowChunks = HEAD_DIM * int(sizeof(Kv)) / 16, kChunks = (kRowChunks + 1) / 2 * 2;
    static constexpr int kTileBytes = TOKENS * kChunks * 16;

    unsigned char* shared;
    Places places;
    int slot = 0;

    __device__ __forceinline__ KvStream(unsigned char* shared, const Places& places) : shared(shared), places(places) {
        const int first = places.begin / TOKENS * TOKENS;
        copy(kKeys, first, 0);
        if (SLOTS > 2) copy(kValues, first, 1);
    }

    // Return the keys or the values of the tile whose tokens begin at `first`; valid until the next call. Calls must
    // alternate keys and values, tile after tile, from the tile that contains position `begin`. All threads of the
    // block call together.
    template <int WHICH> __device__ __forceinline__ const unsigned char* next(int first) {
        constexpr int kAhead = WHICH + SLOTS - 1;
        const int current = slot;
        const int free = slot == 0 ? SLOTS - 1 : slot - 1;  // the barrier below waits for its readers
        slot = slot == SLOTS - 1 ? 0 : slot + 1;
        cp_async_wait<SLOTS - 2>();
        __syncthreads();
        copy(kAhead % 2, first + kAhead / 2 * TOKENS, free);
        return shared + current * kTileBytes;
    }

  private:
    __device__ __forceinline__ void copy(int which, int first, int to) {
        unsigned char* tile = shared + to * kTileBytes;
        if (first < places.end) {
            if (which == kKeys) places.move_to(first);
#pragma unroll
            for (int i = 0; i < (TOKENS * kChunks + THREADS - 1) / THREADS; ++i) {
                const unsigned chunk_index = threadIdx.x + i * THREADS;
                if (TOKENS * kChunks % THREADS != 0 && chunk_index >= TOKENS * kChunks) break;
                const unsigned row = chunk_index / kChunks, chunk = chunk_index % kChunks;
                const int position = first + int(row);
                const bool exists = position >= places.begin && position < places.end && chunk < kRowChunks;
                const unsigned char* source = places.numbers(position, which) + chunk * 16;
                cp_async_16(tile + swizzled<kChunks>(row, chunk) * 16, source, exists ? 16 : 0);
            }
        }
        cp_async_commit();
    }
};

// The stream of keys and values to shared memory for products of warpgroups: one warp starts copies of boxes, or three
// copy quantised numbers and make them fp16, and the others wait for whole tiles.
//
// A tile has kHalves parts, each [kTokens, 64], with rows of 128 bytes that are swizzled. Tiles take the slots of a
// ring in turn: the keys and then the values of the first tokens, then the next tokens'. So the tile with number n is in
// slot n % kSlots, and its barriers' phase has the parity of n / kSlots.
//
// A head's last numbers may fill a part of a half only; those beyond them are 0 in the tile.
//
// Macros: HEAD_DIM, NUM_WARPGROUPS.

#pragma once

#include "common/hopper.cuh"
#include "prefill/prefill_products.cuh"
#include "prefill/prefill_quantised.cuh"

constexpr bool kIsQuantised = KV_DTYPE > 1;
constexpr int kSlots = KV_DTYPE == 2 && HEAD_DIM > 64 ? 3 : 4;  // as many as shared memory has room for
constexpr int kHalves = (HEAD_DIM + 63) / 64;
constexpr int kHalfBytes = kTokens * 128, kTileBytes = kHalves * kHalfBytes;
constexpr int kComputingWarps = kThreads / 32, kConvertingWarps = 3;

// In shared memory.
struct Ring {
    unsigned char tiles[kSlots][kTileBytes];
    Barrier full[kSlots];   // a tile has come
    Barrier empty[kSlots];  // all computing warps have used it
    Barrier unmasked;       // a tile has come that the copying warp still has to change

    __device__ __forceinline__ void init() {
        for (int slot = 0; slot < kSlots; ++slot) {
            barrier_init(&full[slot], kIsQuantised ? kConvertingWarps : 1);
            barrier_init(&empty[slot], kComputingWarps);
        }
        barrier_init(&unmasked, 1);
        fence_stores();
    }

    __device__ __forceinline__ const unsigned char* wait(int number) {
        barrier_wait(&full[number % kSlots], number / kSlots & 1);
        return tiles[number % kSlots];
    }
    // Return the memory of a tile that the computing warps have used.
    __device__ __forceinline__ unsigned char* reuse(int number) {
        barrier_wait(&empty[number % kSlots], (number / kSlots & 1) ^ 1);
        return tiles[number % kSlots];
    }
    // Call in each computing warp after its last use of the tile.
    __device__ __forceinline__ void release(int number) {
        if ((threadIdx.x & 31) == 0) barrier_arrive(&empty[number % kSlots]);
    }
};

// Copies keys and values from a cache [pages, 2, kv heads, page size, HEAD_DIM]. A box is 64 numbers of a page's rows.
struct BoxCopies {
    Ring& ring;
    const TensorMap& cache;
    int page_bits;        // 2^page_bits tokens in a page
    int half, box_token;  // of the lane's box, within a tile
    int number = 0;       // of the next tile
    unsigned num_unmasked = 0;
    // Of the run:
    Task task;
    const int* pages;  // of the sequence
    int begin, length;

    __device__ __forceinline__ BoxCopies(Ring& ring, const TensorMap& cache, int page_bits)
        : ring(ring), cache(cache), page_bits(page_bits) {
        const int lane = int(threadIdx.x & 31), boxes_of_half = kTokens >> page_bits;
        half = lane / boxes_of_half;
        box_token = lane % boxes_of_half << page_bits;
    }

    // Copy all tiles with positions from `begin` to `end` of a sequence with `length` positions. All lanes of one warp
    // call together.
    __device__ __forceinline__ void run(const Task& new_task, const int* new_pages, int new_begin, int end,
                                        int new_length) {
        task = new_task;
        pages = new_pages;
        begin = new_begin;
        length = new_length;
        int first = begin / kTokens * kTokens;
        for (int page = find_page(first); first < end;) {
            copy(first, 2 * page, false);
            const int next_page = find_page(first + kTokens);
            // Products also read values whose weight is 0. Other numbers than the sequence's may be NaN.
            copy(first, 2 * page + 1, first < begin || first + kTokens > length);
            first += kTokens;
            page = next_page;
        }
    }

  private:
    // Page 0 for positions before `begin` and outside the sequence.
    __device__ __forceinline__ int find_page(int first) const {
        const int position = first + box_token;
        const bool exists = half < kHalves && position + (1 << page_bits) > begin && position < length;
        return exists ? __ldg(pages + (position >> page_bits)) : 0;
    }

    __device__ __forceinline__ void copy(int first, int half_page, bool masks) {
        const int slot = number % kSlots, lane = int(threadIdx.x & 31);
        unsigned char* tile = ring.reuse(number++);
        Barrier* barrier = masks ? &ring.unmasked : &ring.full[slot];
        if (lane == 0) barrier_arrive_for_bytes(barrier, kTileBytes);
        __syncwarp();
        if (half < kHalves) {
            const int row = (half_page * task.num_kv_heads + task.kv_head) << page_bits;
            copy_box(tile + half * kHalfBytes + box_token * 128, cache, row, half * 64, barrier);
        }
        if (!masks) return;
        barrier_wait(barrier, num_unmasked++ & 1);
        for (int row = 0; row < kTokens; ++row) {
            if (first + row >= begin && first + row < length) continue;
            if (lane < kHalves * 8) {
                *reinterpret_cast<uint4*>(tile + lane / 8 * kHalfBytes + row * 128 + lane % 8 * 16) =
                    make_uint4(0, 0, 0, 0);
            }
        }
        fence_stores();
        __syncwarp();
        if (lane == 0) barrier_arrive(&ring.full[slot]);
    }
};

#if KV_DTYPE > 1
// Brings keys and values of a quantised cache, copied one item ahead.
struct QuantisedTiles {
    using Items = QuantisedItems<32 * kConvertingWarps, kTokens, 1>;

    Ring& ring;
    unsigned char* shared;  // Items::kBytes
    int thread;             // of the converting warps
    int number = 0;         // of the next tile

    // Bring all tiles with positions that `places` finds. All converting warps call.
    __device__ __forceinline__ void run(const KvPlaces& places) {
        Items items{shared, places, thread};
        const int begin = places.begin / kTokens * kTokens;
        items.copy(kKeys, begin);
        items.copy(kValues, begin);
#pragma unroll 1
        for (int i = 0; begin + i / 2 * kTokens < places.end; ++i, ++number) {
            unsigned char* tile = ring.reuse(number);
            cp_async_wait<1>();
            items.convert(i & 1, [&](int row, int chunk) {
                return tile + chunk / 8 * kHalfBytes + row * 128 + (chunk % 8 ^ row % 8) * 16;
            });
            fence_stores();
            __syncwarp();
            if ((threadIdx.x & 31) == 0) barrier_arrive(&ring.full[number % kSlots]);
            items.copy(i & 1, begin + (i / 2 + 1) * kTokens);
        }
        cp_async_wait<0>();
    }
};
#endif

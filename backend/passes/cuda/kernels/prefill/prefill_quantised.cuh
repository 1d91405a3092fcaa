// Streams the keys and values of a quantised cache to shared memory as fp16: q8_0 numbers times their scale, e4m3
// numbers unchanged.

#pragma once

#include "prefill/prefill_tile.cuh"

// The 4 int8 numbers of a word times scale (the same fp16 in both halves), as 2 × 2 fp16; each is rounded once.
__device__ __forceinline__ void q8x4_to_fp16(unsigned numbers, unsigned scale, unsigned& low, unsigned& high) {
    const unsigned unsigned_bytes = numbers ^ 0x80808080u;
    // Byte b with the byte 0x64 above it is the fp16 number 1024 + b; 0xe480 is -(1024 + 128).
    low = mul_f16x2(add_f16x2(prmt(unsigned_bytes, 0x64646464u, 0x4140), 0xe480e480u), scale);
    high = mul_f16x2(add_f16x2(prmt(unsigned_bytes, 0x64646464u, 0x4342), 0xe480e480u), scale);
}

__device__ __forceinline__ void e4m3x4_to_fp16(unsigned numbers, unsigned& low, unsigned& high) {
    low = e4m3x2_to_f16x2(static_cast<unsigned short>(numbers));
    high = e4m3x2_to_f16x2(static_cast<unsigned short>(numbers >> 16));
}

// Copies of quantised keys and values [TOKENS, HEAD_DIM] in shared memory, from where they become fp16. Each of THREADS
// threads converts the bytes that it copied itself.
template <int THREADS, int TOKENS, int UNROLL = 64> struct QuantisedItems {
    static constexpr int kChunks = HEAD_DIM / 16;  // of a row
    static constexpr int kAll = TOKENS * kChunks;
    static constexpr int kPerThread = (kAll + THREADS - 1) / THREADS;
    static constexpr int kScaleBytes = kKvHasScales ? 4 : 0;  // per chunk: the word that contains its scale
    static constexpr int kBytes = 2 * kAll * (16 + kScaleBytes);

    unsigned char* shared;  // kBytes: the bytes of two items, then their scales: keys first, then values
    KvPlaces places;
    int thread;

    // Copy a tile's keys or values, in a group of copies, with zeros for positions that `places` does not find.
    __device__ __forceinline__ void copy(int which, int first) {
        if (first < places.end) {
            if (which == kKeys) places.move_to(first);
#pragma unroll UNROLL
            for (int i = 0; i < kPerThread; ++i) {
                const unsigned chunk_index = thread + i * THREADS;
                if (kAll % THREADS != 0 && chunk_index >= kAll) break;  // for whole warps
                const unsigned chunk = chunk_index % kChunks;
                const int position = first + int(chunk_index / kChunks);
                const bool exists = position >= places.begin && position < places.end;
                const unsigned char* block = places.block(position, which);
                const int place = places.place(position);
                cp_async_16(raw(which, chunk_index), block + place * HEAD_DIM + chunk * 16, exists ? 16 : 0);
                if (kKvHasScales) {
                    const int scale = (HEAD_DIM << places.page_bits) + (scale_index(place, chunk) & ~1) * 2;
                    cp_async_4(raw_scale(which, chunk_index), block + scale, exists ? 4 : 0);
                }
            }
        }
        cp_async_commit();
    }

    // Convert an item whose copies this thread has awaited. place(row, chunk): where chunk of 8 numbers goes.
    template <class P> __device__ __forceinline__ void convert(int which, const P& place) const {
#pragma unroll UNROLL
        for (int i = 0; i < kPerThread; ++i) {
            const unsigned chunk_index = thread + i * THREADS;
            if (kAll % THREADS != 0 && chunk_index >= kAll) break;
            const unsigned row = chunk_index / kChunks, chunk = chunk_index % kChunks;
            const uint4 x = *reinterpret_cast<const uint4*>(raw(which, chunk_index));
            uint4 a, b;
#if KV_DTYPE == 2
            const unsigned word = *reinterpret_cast<const unsigned*>(raw_scale(which, chunk_index));
            const unsigned scale = prmt(word, word, scale_index(row, chunk) & 1 ? 0x3232 : 0x1010);
            q8x4_to_fp16(x.x, scale, a.x, a.y);
            q8x4_to_fp16(x.y, scale, a.z, a.w);
            q8x4_to_fp16(x.z, scale, b.x, b.y);
            q8x4_to_fp16(x.w, scale, b.z, b.w);
#else
            e4m3x4_to_fp16(x.x, a.x, a.y);
            e4m3x4_to_fp16(x.y, a.z, a.w);
            e4m3x4_to_fp16(x.z, b.x, b.y);
            e4m3x4_to_fp16(x.w, b.z, b.w);
#endif
            *reinterpret_cast<uint4*>(place(row, 2 * chunk)) = a;
            *reinterpret_cast<uint4*>(place(row, 2 * chunk + 1)) = b;
        }
    }

  private:
    __device__ __forceinline__ unsigned char* raw(int which, unsigned chunk_index) const {
        return shared + (which * kAll + chunk_index) * 16;
    }
    __device__ __forceinline__ unsigned char* raw_scale(int which, unsigned chunk_index) const {
        return shared + 2 * kAll * 16 + (which * kAll + chunk_index) * 4;
    }

    // The index of a chunk's scale among its block's scales. An aligned pair of scales is copied. Pages and tiles have
    // even numbers of tokens, so the lowest bit is the same for a token's row in the tile and its place in the page.
    static __device__ __forceinline__ int scale_index(int place, int chunk) {
        return place * (HEAD_DIM / kQ8Block) + chunk / (kQ8Block / 16);
    }
};

// Like KvStream, with fp16 tiles. Copies are one item ahead of use.
template <int THREADS, int TOKENS> struct QuantisedKvStream {
    static constexpr int kTileBytes = TOKENS * HEAD_DIM * 2;

    unsigned char* shared;  // two tiles, then the items
    QuantisedItems<THREADS, TOKENS> items;

    __device__ __forceinline__ QuantisedKvStream(unsigned char* shared, const KvPlaces& places)
        : shared(shared), items{shared + 2 * kTileBytes, places, int(threadIdx.x)} {
        const int first = places.begin / TOKENS * TOKENS;
        items.copy(kKeys, first);
        items.copy(kValues, first);
    }

    template <int WHICH> __device__ __forceinline__ const unsigned char* next(int first) {
        unsigned char* tile = shared + WHICH * kTileBytes;
        cp_async_wait<1>();
        // All readers of this tile have passed the barrier in the call for the other tile.
        items.convert(WHICH, [&](int row, int chunk) { return tile + swizzled<HEAD_DIM / 8>(row, chunk) * 16; });
        __syncthreads();
        items.copy(WHICH, first + TOKENS);
        return tile;
    }
};

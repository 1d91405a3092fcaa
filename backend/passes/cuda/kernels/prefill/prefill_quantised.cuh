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

// Like KvStream, with fp16 tiles. Each thread copies the bytes that it later converts itself, one item ahead of use.
template <int THREADS, int TOKENS> struct QuantisedKvStream {
    static constexpr int kRawChunks = HEAD_DIM / 16;  // of a row
    static constexpr int kItemChunks = TOKENS * kRawChunks;
    static constexpr int kPerThread = (kItemChunks + THREADS - 1) / THREADS;
    static constexpr int kTileBytes = TOKENS * HEAD_DIM * 2;
    static constexpr int kScaleBytes = kKvHasScales ? 4 : 0;  // per chunk: the word that contains its scale

    unsigned char* shared;  // two tiles, then the bytes of two items, then their scales: keys first, then values
    KvPlaces places;

    __device__ __forceinline__ QuantisedKvStream(unsigned char* shared, const KvPlaces& places)
        : shared(shared), places(places) {
        const int first = places.begin / TOKENS * TOKENS;
        copy(kKeys, first);
        copy(kValues, first);
    }

    template <int WHICH> __device__ __forceinline__ const unsigned char* next(int first) {
        cp_async_wait<1>();
        convert(WHICH);  // all readers of this tile have passed the barrier in the call for the other tile
        __syncthreads();
        copy(WHICH, first + TOKENS);
        return shared + WHICH * kTileBytes;
    }

  private:
    __device__ __forceinline__ unsigned char* raw(int which, unsigned chunk_index) const {
        return shared + 2 * kTileBytes + (which * kItemChunks + chunk_index) * 16;
    }
    __device__ __forceinline__ unsigned char* raw_scale(int which, unsigned chunk_index) const {
        return shared + 2 * kTileBytes + 2 * kItemChunks * 16 + (which * kItemChunks + chunk_index) * 4;
    }

    __device__ __forceinline__ void copy(int which, int first) {
        if (first < places.end) {
            if (which == kKeys) places.move_to(first);
#pragma unroll
            for (int i = 0; i < kPerThread; ++i) {
                const unsigned chunk_index = threadIdx.x + i * THREADS;
                if (kItemChunks % THREADS != 0 && chunk_index >= kItemChunks) break;
                const unsigned chunk = chunk_index % kRawChunks;
                const int position = first + int(chunk_index / kRawChunks);
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

    __device__ __forceinline__ void convert(int which) {
        unsigned char* tile = shared + which * kTileBytes;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            const unsigned chunk_index = threadIdx.x + i * THREADS;
            if (kItemChunks % THREADS != 0 && chunk_index >= kItemChunks) break;
            const unsigned row = chunk_index / kRawChunks, chunk = chunk_index % kRawChunks;
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
            *reinterpret_cast<uint4*>(tile + swizzled<2 * kRawChunks>(row, 2 * chunk) * 16) = a;
            *reinterpret_cast<uint4*>(tile + swizzled<2 * kRawChunks>(row, 2 * chunk + 1) * 16) = b;
        }
    }

    // The index of a chunk's scale among its block's scales. An aligned pair of scales is copied. Pages and tiles have
    // even numbers of tokens, so the lowest bit is the same for a token's row in the tile and its place in the page.
    static __device__ __forceinline__ int scale_index(int place, int chunk) {
        return place * (HEAD_DIM / kQ8Block) + chunk / (kQ8Block / 16);
    }
};

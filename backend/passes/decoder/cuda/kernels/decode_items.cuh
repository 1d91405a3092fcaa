// The pieces into which decode attention is cut: a chunk of one row's context each, for every KV head.

#pragma once

constexpr int kShortestChunk = 256;  // tokens
constexpr int kFirstMultiple = 16;   // a chunk begins at a multiple of this, and divides by it: divides page sizes

struct __align__(16) Item {
    int row;
    int slot;
    int length;  // tokens of the row's context, its own included
    int chunk;
};

// What a row attends to, and how it is cut: by its own length and constants of the model only, so that a row's bits
// know nothing of its batch.
struct Span {
    int begin;         // the first token attended to
    int first;         // where the first chunk begins: begin, rounded down
    int chunk_tokens;  // of each but the last chunk
    int num_chunks;

    __device__ __forceinline__ Span(int length, int window, int max_chunks) {
        begin = window > 0 ? max(length - window, 0) : 0;
        first = begin - begin % kFirstMultiple;
        chunk_tokens = kShortestChunk;
        while (chunk_tokens * max_chunks < length - first) chunk_tokens *= 2;
        num_chunks = (length - first + chunk_tokens - 1) / chunk_tokens;
    }
    __device__ __forceinline__ int start(int chunk) const { return first + chunk * chunk_tokens; }
};

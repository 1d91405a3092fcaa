// The items of decode attention. An item is one chunk of one row's context, for all KV heads.
//
// Macro: CHUNK_TOKENS, of the shortest chunk, if it is not 256.

#pragma once

#ifndef CHUNK_TOKENS
#define CHUNK_TOKENS 256
#endif
constexpr int kShortestChunk = CHUNK_TOKENS;
constexpr int kFirstMultiple = 16;   // chunks begin at a multiple of this, which divides all page sizes

struct __align__(16) Item {
    int row;
    int slot;
    int length;  // tokens of the row's context, including the row's own token
    int chunk;
};

// The tokens that a row attends to, and how they are cut into chunks. This depends only on the row's length and on
// constants of the model, so a row's bits do not depend on its batch.
struct Span {
    int begin;         // the first token attended to
    int first;         // start of the first chunk: begin, rounded down
    int chunk_tokens;  // of every chunk except the last
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

// The items of decode attention. An item is one chunk of one row's context, for all KV heads.

#pragma once

constexpr int kFirstMultiple = 16;   // chunks begin at a multiple of this, which divides all page sizes

struct __align__(16) Item {
    int row;
    int slot;
    int length;  // tokens of the row's context, including the row's own token
    int chunk;
};

// What plan_decode finds out about a step.
struct Plan {
    int num_items;
    int shortest_chunk;  // tokens
};

// The tokens that a row attends to, and how they are cut into chunks. This depends on the row's length, the step's
// shortest chunk and constants of the model.
struct Span {
    int begin;         // the first token attended to
    int first;         // start of the first chunk: begin, rounded down
    int chunk_tokens;  // of every chunk except the last
    int num_chunks;

    __device__ __forceinline__ Span(int length, int window, int max_chunks, int shortest_chunk) {
        begin = window > 0 ? max(length - window, 0) : 0;
        first = begin - begin % kFirstMultiple;
        chunk_tokens = shortest_chunk;
        while (chunk_tokens * max_chunks < length - first) chunk_tokens *= 2;
        num_chunks = (length - first + chunk_tokens - 1) / chunk_tokens;
    }
    __device__ __forceinline__ int start(int chunk) const { return first + chunk * chunk_tokens; }
};

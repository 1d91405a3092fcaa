// Which token of a step is embedded.

#pragma once

#include "step/step_rows.cuh"

constexpr int kFromSlot = -1;        // stands for the token last sampled for the row's slot
constexpr int kFromEmbeddings = -2;  // the residual stream already has the embedding

// The id of the step's token `number`; kFromSlot remains in a padding row. last_tokens [max_slots].
__device__ __forceinline__ int token_to_embed(int number, const int* input_ids, const int* last_tokens,
                                              const int* query_starts, const int* slots, int num_rows) {
    const int token_id = input_ids[number];
    if (token_id != kFromSlot) return token_id;
    const int slot = slots[row_of_token(number, query_starts, num_rows)];
    return slot >= 0 ? last_tokens[slot] : token_id;
}

// Rows with drafts: each position is sampled by a slot of its own, as step/draft_sampling.py says.

#include "sampling/sampling.cuh"

// A row of the step: the places of its positions in the step's logits are first, first + 1, ..., and `place` last.
struct __align__(16) DraftRow {
    int place, first, count;  // count: drafts, one less than positions
    int copies;               // the first position's slot
};

// The step's drafts and slots: ids [T]; logit_tokens and slots [L + D], of which those of places below L are used.
struct Drafts {
    const int* ids;
    const int* logit_tokens;
    const int* slots;

    __device__ __forceinline__ const int* of(const DraftRow& row) const { return ids + logit_tokens[row.first] + 1; }
};

// Let the positions' slots be copies of the row's, with the drafts before each counted. Blocks: x rows, y positions, z
// parts of the counts.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    open_drafts(const DraftRow* __restrict__ rows, const int* __restrict__ ids, const int* __restrict__ logit_tokens,
                const int* __restrict__ slots, SlotParams* slot_params, unsigned short* counts, int* bias_tokens,
                float* bias_values, int vocab_size, int max_biases) {
    const DraftRow row = rows[blockIdx.x];
    const int number = blockIdx.y;
    if (number > row.count) return;
    const long long from = slots[row.place], to = row.copies + number;
    const SlotParams params = slot_params[from];
    if (blockIdx.z == 0) {
        if (threadIdx.x == 0) slot_params[to] = params;
        for (int i = threadIdx.x; i < params.num_biases; i += kThreads) {
            bias_tokens[to * max_biases + i] = bias_tokens[from * max_biases + i];
            bias_values[to * max_biases + i] = bias_values[from * max_biases + i];
        }
    }
    if (!params.is_penalised) return;
    const int width = (vocab_size + 7) / 8;  // 16 bytes each
    const uint4* const source = reinterpret_cast<const uint4*>(counts) + from * width;
    uint4* const copy = reinterpret_cast<uint4*>(counts) + to * width;
    for (int i = blockIdx.z * kThreads + threadIdx.x; i < width; i += gridDim.z * kThreads) copy[i] = source[i];
    __syncthreads();
    if (threadIdx.x != 0) return;
    const int* const drafts = Drafts{ids, logit_tokens, slots}.of(row);
    for (int i = 0; i < number; ++i)
        if (drafts[i] / (8 * kThreads) % gridDim.z == blockIdx.z) count_token(counts + to * width * 8, drafts[i]);
}

// Finds each row's token, the first that is not the next draft. mask_rows, tokens: [L + D]; tokens and accepted of the
// rows' places, and last_tokens and counts of their slots, are written. A row with masks accepts drafts only as far as it
// has some. Blocks: x rows.
extern "C" __global__ void __launch_bounds__(32, 1)
    accept_drafts(const DraftRow* __restrict__ rows, const int* __restrict__ ids,
                  const int* __restrict__ logit_tokens, const int* __restrict__ slots,
                  const SlotParams* __restrict__ slot_params, unsigned short* counts,
                  const int* __restrict__ mask_rows, int* last_tokens, int* tokens, int* accepted, int vocab_size) {
    if (threadIdx.x != 0) return;
    const DraftRow row = rows[blockIdx.x];
    const int* const drafts = Drafts{ids, logit_tokens, slots}.of(row);
    const auto place = [&](int number) { return number < row.count ? row.first + number : row.place; };
    const long long slot = slots[row.place];
    unsigned short* const own = slot_params[slot].is_penalised ? counts + slot * ((vocab_size + 7) / 8 * 8) : nullptr;
    int number = 0, token = tokens[place(0)];
    while (number < row.count && token == drafts[number] &&
           (mask_rows[place(number)] < 0 || mask_rows[place(number + 1)] >= 0)) {
        if (own != nullptr) count_token(own, token);
        token = tokens[place(++number)];
    }
    tokens[row.place] = token;
    accepted[row.place] = number;
    last_tokens[slot] = token < 0 ? 0 : token;
    if (own != nullptr && token >= 0) count_token(own, token);
}

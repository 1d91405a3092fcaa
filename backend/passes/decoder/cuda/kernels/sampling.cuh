// Shared by the sampling kernels: a slot's parameters, a row's adjusted logits, and random numbers.
//
// Every kernel reads the logits again, one block per segment of a row, and adjusts them while reading. Blocks exchange
// integers only (floats as ordered integers, counts, probability mass in fixed point), so no result depends on their
// order.

#pragma once

#include "logits.cuh"
#include "reduce.cuh"

constexpr int kThreads = 256;
constexpr int kSegment = 4096;  // logits of a row per block; limited by 32-bit sums of 19-bit numbers
constexpr int kBins = 2048;     // of the first of three levels, which has 11 of 31 bits; the others have half as many

// Packed by step/device_sampler.py.
struct __align__(16) SlotParams {
    float inverse_temperature;  // 0 is greedy
    int top_k;                  // 0: off
    float top_p, typical_p;     // 1: off
    float largest_gap;          // from min_p: how far a token's logit may be below the largest
    float repetition, frequency, presence;
    unsigned seed_low, seed_high;
    int is_penalised, is_filtered, num_biases;
    int padding[3];
};

// The state of one row's sampling between its kernels. Blocks of the row add to `best`, `largest` and the sums; the
// last block reads and resets them.
struct __align__(16) RowState {
    unsigned long long best;          // score and token of the best draw, see `candidate`
    unsigned long long likeliest;     // largest logit that passed the filters before min_p, and its token
    unsigned long long target;        // of the current filter: how much of its content is still to be found
    unsigned long long mass;          // sum of mass in fixed point; gap_mass: sum of gaps times mass
    unsigned long long gap_mass;
    unsigned largest;                 // order_of the largest logit
    unsigned ticket;
    unsigned prefix;                  // of the current filter: the key's bits found so far
    int draws;                        // whether draw_rows samples this row, which then has filters and a finite peak
    float peak;                       // the largest adjusted logit
    float mean_gap;                   // mean of the scaled gaps
    float largest_gap;                // tokens with a larger gap to the peak are removed
    float largest_deviation;          // tokens whose scaled gap differs more from mean_gap are removed
    int padding[2];
};

// One row of the logits, and the adjustments to it.
struct Row {
    const Act* logits;
    int vocab_size;
    const SlotParams& params;
    const unsigned short* counts;   // per token: times generated << 1 | whether it is in the prompt
    const unsigned* mask;           // bits of the allowed tokens, or null
    const float* biases;            // of the segment's tokens, in shared memory; or null

    // Load the adjusted logits of tokens first to first + 7; -inf past the vocabulary.
    __device__ __forceinline__ void load(int first, float (&x)[8]) const {
        load_logits(logits, vocab_size, first, x);
        if (params.is_penalised) penalise(first, x);
        if (biases != nullptr) {
            float added[8];
            load8(biases + first % kSegment, added);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] += added[j];
        }
        if (mask != nullptr && first < vocab_size) {
            const unsigned allowed = mask[first / 32] >> (first % 32);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = allowed >> j & 1 ? x[j] : -infinity();
        }
    }

    __device__ __forceinline__ void penalise(int first, float (&x)[8]) const {
        const uint4 pairs = *reinterpret_cast<const uint4*>(counts + first);
        const unsigned words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const unsigned word = words[j / 2] >> (16 * (j % 2)) & 0xffffu;
            if (word == 0) continue;
            // All kernels must fuse the same operations: the peak's gap to itself must be 0 in each of them.
            const float y = x[j] > 0.0f ? x[j] / params.repetition : __fmul_rn(x[j], params.repetition);
            const float less_frequent = __fsub_rn(y, __fmul_rn(params.frequency, float(word >> 1)));
            x[j] = word > 1 ? __fsub_rn(less_frequent, params.presence) : less_frequent;
        }
    }
};

// The tokens of a row that have passed the filters so far. All kernels compute the same bits.
struct Kept {
    float peak, inverse_temperature, mean_gap, largest_gap, largest_deviation;

    __device__ __forceinline__ Kept(const RowState& state, const SlotParams& params)
        : peak(state.peak), inverse_temperature(params.inverse_temperature), mean_gap(state.mean_gap),
          largest_gap(state.largest_gap), largest_deviation(state.largest_deviation) {}

    __device__ __forceinline__ float gap(float x) const { return __fsub_rn(peak, x); }
    __device__ __forceinline__ float scaled_gap(float x) const { return __fmul_rn(gap(x), inverse_temperature); }
    // Of the token's surprisal from the entropy.
    __device__ __forceinline__ float deviation(float x) const { return fabsf(__fsub_rn(scaled_gap(x), mean_gap)); }
    __device__ __forceinline__ bool has(float x) const {
        return gap(x) <= largest_gap && deviation(x) <= largest_deviation;
    }
};

// The arrays of all slots, and of a step's L rows.
struct Step {
    const Act* logits;              // [L, logits_stride]
    long long logits_stride;
    int vocab_size;
    const int* slots;               // [L]; -1 is padding
    const int* context_lens;        // [L] tokens before the token whose logits these are
    const int* mask_rows;           // [L] row of masks; -1 allows all tokens
    const unsigned* masks;          // [M, ceil(vocab_size / 32)]
    const SlotParams* slot_params;  // [max_slots], like counts, biases and last_tokens
    unsigned short* counts;         // [max_slots, vocab_size rounded up to a multiple of 8]
    const int* bias_tokens;         // [max_slots, max_biases], distinct within a slot
    const float* bias_values;
    int max_biases;
    int* last_tokens;
    RowState* states;               // [L]
    int* tokens;                    // [L]

    // Position in its sequence of the token that the block's row samples.
    __device__ __forceinline__ int position() const { return context_lens[blockIdx.y] + 1; }
    __device__ __forceinline__ long long counts_of(int slot) const {
        return (long long)(slot) * ((vocab_size + 7) / 8 * 8);
    }

    // The block's row (blockIdx.y) and segment (blockIdx.x). segment_biases: kSegment entries of shared memory. All
    // threads call.
    __device__ __forceinline__ Row row(int slot, const SlotParams& params, float* segment_biases) const {
        const Act* row_logits = logits + blockIdx.y * logits_stride;
        const int mask_row = mask_rows[blockIdx.y];
        const unsigned* mask = mask_row < 0 ? nullptr : masks + (long long)(mask_row) * ((vocab_size + 31) / 32);
        if (params.num_biases > 0) {
            for (int i = threadIdx.x; i < kSegment; i += kThreads) segment_biases[i] = 0.0f;
            __syncthreads();
            const int begin = blockIdx.x * kSegment;
            for (int i = threadIdx.x; i < params.num_biases; i += kThreads) {
                const int place = bias_tokens[slot * max_biases + i] - begin;
                if (place >= 0 && place < kSegment) segment_biases[place] = bias_values[slot * max_biases + i];
            }
            __syncthreads();
        }
        return {row_logits, vocab_size, params, counts + counts_of(slot), mask,
                params.num_biases > 0 ? segment_biases : nullptr};
    }

    // Called by one thread once the row's token is known; -1 for none.
    __device__ __forceinline__ void finish(int slot, const SlotParams& params, int token) const {
        tokens[blockIdx.y] = token;
        last_tokens[slot] = token < 0 ? 0 : token;
        if (params.is_penalised && token >= 0) {
            unsigned short& word = counts[counts_of(slot) + token];
            if (word < 0xfffe) word += 2;
        }
    }
};

// The kernel parameters from which STEP makes a Step.
#define STEP_PARAMETERS                                                                                            \
    const Act *__restrict__ logits, long long logits_stride, int vocab_size, const int *__restrict__ row_slots,    \
        const int *__restrict__ context_lens, const int *__restrict__ mask_rows, const unsigned *__restrict__ masks,  \
        const SlotParams *__restrict__ slot_params, unsigned short *counts, const int *__restrict__ bias_tokens,   \
        const float *__restrict__ bias_values, int max_biases, int *last_tokens, RowState *states, int *tokens
#define STEP                                                                                                       \
    Step {                                                                                                         \
        logits, logits_stride, vocab_size, row_slots, context_lens, mask_rows, masks, slot_params, counts,            \
            bias_tokens, bias_values, max_biases, last_tokens, states, tokens                                      \
    }

// Call each(first, x) for every 8 tokens of this thread's share of the block's segment, in ascending order.
template <class F> __device__ __forceinline__ void for_segment(const Row& row, const F& each) {
    const int begin = blockIdx.x * kSegment, end = min(begin + kSegment, row.vocab_size);
    for (int first = begin + threadIdx.x * 8; first < end; first += kThreads * 8) {
        float x[8];
        row.load(first, x);
        each(first, x);
    }
}

// Whether this block is the last of its row to call. It then sees all earlier writes of the row's other blocks. All
// threads call.
__device__ __forceinline__ bool is_last_of_row(RowState& state) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = take_ticket(&state.ticket) == gridDim.x - 1;
        if (is_last) state.ticket = 0;
    }
    __syncthreads();
    return is_last;
}

// Philox4x32-10 (Salmon et al., SC 2011): 4 × 32 random bits for a key and a counter.
__device__ __forceinline__ uint4 philox(unsigned key_low, unsigned key_high, unsigned counter_0, unsigned counter_1) {
    uint4 c = make_uint4(counter_0, counter_1, 0u, 0u);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned high_0 = __umulhi(0xd2511f53u, c.x), low_0 = 0xd2511f53u * c.x;
        const unsigned high_1 = __umulhi(0xcd9e8d57u, c.z), low_1 = 0xcd9e8d57u * c.z;
        c = make_uint4(high_1 ^ c.y ^ key_low, low_1, high_0 ^ c.w ^ key_high, low_0);
        key_low += 0x9e3779b9u;
        key_high += 0xbb67ae85u;
    }
    return c;
}

constexpr float kLargestGumbel = 23.0f;  // -log(2^-33) is 22.87

// -log(-log(1 - u)) with u = (bits + 1/2) / 2^32: standard Gumbel noise. Its large values decide the draw; they come
// from small u, where floats are dense.
__device__ __forceinline__ float gumbel(unsigned bits) {
    constexpr float kLn2 = 0.693147180559945f;
    const float u = fminf(fmaf(float(bits), 2.3283064365386963e-10f, 1.1641532182693481e-10f), 0.99999994f);
    // -log(1 - u): by its series below 2^-5, where 1 - u would lose the last bits of u; exact to 1e-8.
    const float series = u * (1.0f + u * (0.5f + u * (0.33333333f + u * (0.25f + u * 0.2f))));
    const float exponential = u < 0.03125f ? series : -kLn2 * lg2_approx(1.0f - u);
    return -kLn2 * lg2_approx(exponential);
}

// The best of `best` and the draws of tokens first to first + 7 at these logits. A draw is logit / T + Gumbel noise of
// (seed, position, token); the argmax of the draws has the distribution of the softmax.
__device__ __forceinline__ unsigned long long draw(const SlotParams& params, int position, int first,
                                                   const float (&x)[8], unsigned long long best) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float top = fmaxf(fmaxf(x[4 * half], x[4 * half + 1]), fmaxf(x[4 * half + 2], x[4 * half + 3]));
        if (top == -infinity()) continue;
        if (candidate(fmaf(top, params.inverse_temperature, kLargestGumbel), first) < best) continue;
        const uint4 random = philox(params.seed_low, params.seed_high, position, first / 4 + half);
        const unsigned bits[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float logit = x[4 * half + j];
            if (logit == -infinity()) continue;
            const float score = fmaf(logit, params.inverse_temperature, gumbel(bits[j]));
            best = Largest{}(best, candidate(score, first + 4 * half + j));
        }
    }
    return best;
}

// Shared by the sampling kernels: a slot's parameters, a row's adjusted logits, and random numbers.
//
// A kernel adjusts logits while it reads them. Blocks exchange integers only (floats as ordered integers, counts,
// probability mass in fixed point) and lists whose order does not matter, so no result depends on the order of blocks.

#pragma once

#include "sampling/logits.cuh"
#include "common/reduce.cuh"

constexpr int kThreads = 256;                  // of a block
constexpr int kChunk = 4096;                   // logits whose biases are in shared memory at once
constexpr int kTurnTokens = kThreads * 8;
constexpr int kTurns = kChunk / kTurnTokens;   // a thread's loads of 8 logits in a chunk; all are on their way at once
constexpr float kLargestFloat = 3.4028234663852886e38f;

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

// The state of one row's sampling between and within its kernels. Blocks of the row add to the first part; the last block
// reads and resets it.
struct __align__(16) RowState {
    unsigned long long best;          // score and token of the best draw, see `candidate`
    unsigned long long mass;          // sum of mass in fixed point; gap_mass: sum of gaps times mass
    unsigned long long gap_mass;
    unsigned largest;                 // order_of the largest logit
    unsigned ticket;
    unsigned num_listed;              // tokens that were to be listed; more than fit if the list is not complete

    int draws;                        // whether filter_rows samples this row, which then has filters and a finite peak
    float peak;                       // the largest adjusted logit
    float reach;                      // tokens with at most this gap to the peak are listed

    float mean_gap, largest_gap, largest_deviation;  // what the filters found, see `Kept`; only checks read them
    int padding;
};

// One row of the logits, and the adjustments to it.
struct Row {
    const Act* logits;
    int vocab_size;
    const SlotParams& params;
    const unsigned short* counts;   // per token: times generated << 1 | whether it is in the prompt
    const unsigned* mask;           // bits of the allowed tokens, or null
    const int* bias_tokens;         // params.num_biases
    const float* bias_values;
    bool is_adjusted;               // whether `adjust` does anything
    float* biases;                  // shared memory, kChunk numbers: the biases of the chunk that is being read

    // Make the biases of the chunk that begins at `begin` ready for `adjust`. All threads of the block call.
    __device__ __forceinline__ void open_chunk(int begin) const {
        if (params.num_biases == 0) return;
        __syncthreads();  // all have read the chunk before
        for (int i = threadIdx.x; i < kChunk; i += kThreads) biases[i] = 0.0f;
        __syncthreads();
        for (int i = threadIdx.x; i < params.num_biases; i += kThreads) {
            const int place = bias_tokens[i] - begin;
            if (place >= 0 && place < kChunk) biases[place] = bias_values[i];
        }
        __syncthreads();
    }

    // Adjust the logits of tokens first to first + 7.
    __device__ __forceinline__ void adjust(int first, float (&x)[8]) const {
        if (params.is_penalised && first < vocab_size) penalise(first, x);
        if (params.num_biases > 0) {
            float added[8];
            load8(biases + first % kChunk, added);
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

    // All tokens.
    __device__ __forceinline__ Kept(float peak, float inverse_temperature)
        : peak(peak), inverse_temperature(inverse_temperature), mean_gap(0.0f), largest_gap(infinity()),
          largest_deviation(infinity()) {}

    __device__ __forceinline__ float gap(float x) const { return __fsub_rn(peak, x); }
    __device__ __forceinline__ float scaled_gap(float x) const { return __fmul_rn(gap(x), inverse_temperature); }
    // Of the token's surprisal from the entropy.
    __device__ __forceinline__ float deviation(float x) const { return fabsf(__fsub_rn(scaled_gap(x), mean_gap)); }
    __device__ __forceinline__ bool has(float x) const {
        return gap(x) <= largest_gap && deviation(x) <= largest_deviation;
    }
};

// Count a generated token in its slot's counts.
__device__ __forceinline__ void count_token(unsigned short* counts, int token) {
    if (counts[token] < 0xfffe) counts[token] += 2;
}

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
    float* group_peaks;             // [L, blocks * threads]: the largest logit of each thread of scan_rows
    uint2* lists;                   // [L, list_size]: logits and tokens that filters may keep, in any order
    int list_size;
    int* tokens;                    // [L]

    // Position in its sequence of the token that the block's row samples.
    __device__ __forceinline__ int position() const { return context_lens[blockIdx.y] + 1; }
    __device__ __forceinline__ long long counts_of(int slot) const {
        return (long long)(slot) * ((vocab_size + 7) / 8 * 8);
    }

    // The block's row (blockIdx.y). biases: kChunk numbers of shared memory.
    __device__ __forceinline__ Row row(int slot, const SlotParams& params, float* biases) const {
        const int mask_row = mask_rows[blockIdx.y];
        const unsigned* mask = mask_row < 0 ? nullptr : masks + (long long)(mask_row) * ((vocab_size + 31) / 32);
        return {logits + blockIdx.y * logits_stride, vocab_size, params, counts + counts_of(slot), mask,
                bias_tokens + slot * max_biases, bias_values + slot * max_biases,
                params.is_penalised || params.num_biases > 0 || mask != nullptr, biases};
    }
    __device__ __forceinline__ float* row_group_peaks() const {
        return group_peaks + (long long)(blockIdx.y) * gridDim.x * kThreads;
    }
    __device__ __forceinline__ uint2* list() const { return lists + (long long)(blockIdx.y) * list_size; }

    // Called by one thread once the row's token is known; -1 for none.
    __device__ __forceinline__ void finish(int slot, const SlotParams& params, int token) const {
        tokens[blockIdx.y] = token;
        last_tokens[slot] = token < 0 ? 0 : token;
        if (params.is_penalised && token >= 0) count_token(counts + counts_of(slot), token);
    }
};

// The kernel parameters from which STEP makes a Step.
#define STEP_PARAMETERS                                                                                            \
    const Act *__restrict__ logits, long long logits_stride, int vocab_size, const int *__restrict__ row_slots,    \
        const int *__restrict__ context_lens, const int *__restrict__ mask_rows, const unsigned *__restrict__ masks,  \
        const SlotParams *__restrict__ slot_params, unsigned short *counts, const int *__restrict__ bias_tokens,   \
        const float *__restrict__ bias_values, int max_biases, int *last_tokens, RowState *states,          \
        float *group_peaks, uint2 *lists, int list_size, int *tokens
#define STEP                                                                                                       \
    Step {                                                                                                         \
        logits, logits_stride, vocab_size, row_slots, context_lens, mask_rows, masks, slot_params, counts,            \
            bias_tokens, bias_values, max_biases, last_tokens, states, group_peaks, lists, list_size, tokens       \
    }

// Call each(first, x) for a thread's tokens of each chunk from `begin` (a multiple of kChunk) to `end`. x[i][j] is the
// logit of token first + i * kTurnTokens + j, -inf beyond the vocabulary. Whole warps call it. All threads of the block
// call. The next chunk is on its way during a call, so that memory does not rest while all warps compute; not of fp32
// logits, for which there are too few registers.
template <class F> __device__ __forceinline__ void for_tokens(const Row& row, int begin, int end, const F& each) {
    if (begin >= end) return;
    const int place = int(threadIdx.x) * 8;
    constexpr bool kReadsAhead = sizeof(Act) == 2;
    Logits8<Act> next[kTurns];
    if (kReadsAhead) load_logits(row.logits, row.vocab_size, begin + place, kTurnTokens, next);
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk += kChunk) {
        row.open_chunk(chunk);
        float x[kTurns][8];
        const int first = chunk + place;
        if (!kReadsAhead) load_logits(row.logits, row.vocab_size, first, kTurnTokens, next);
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) next[turn].unpack_to(x[turn]);
        if (kReadsAhead && chunk + kChunk < end)
            load_logits(row.logits, row.vocab_size, first + kChunk, kTurnTokens, next);
        // One branch for all.
        for (int turn = 0; turn < kTurns; ++turn)
            if (row.is_adjusted) row.adjust(first + turn * kTurnTokens, x[turn]);
        each(first, x);
    }
}
// The same with 8 tokens a call: x[j] is the logit of token first + j.
template <class F> __device__ __forceinline__ void for_eights(const Row& row, int begin, int end, const F& each) {
    for_tokens(row, begin, end, [&](int first, float(&x)[kTurns][8]) {
        // Not unrolled, so that code is short.
#pragma unroll 1
        for (int turn = 0; turn < kTurns; ++turn) {
            each(first + turn * kTurnTokens, x[0]);
#pragma unroll
            for (int i = 1; i < kTurns; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) x[i - 1][j] = x[i][j];
        }
    });
}
// The block's segment of its row, from x to y: whole chunks, as many in each block. No result depends on their number.
__device__ __forceinline__ int2 segment_of(const Row& row) {
    const int num_chunks = (row.vocab_size + kChunk - 1) / kChunk;
    const int segment = (num_chunks + gridDim.x - 1) / gridDim.x * kChunk, begin = blockIdx.x * segment;
    return make_int2(begin, min(begin + segment, row.vocab_size));
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

constexpr int kPhiloxRounds = 10;

// Keys of Philox's rounds, computed where they are used.
struct PhiloxKey {
    unsigned low_key, high_key;

    __device__ __forceinline__ unsigned low(int round) const { return low_key + round * 0x9e3779b9u; }
    __device__ __forceinline__ unsigned high(int round) const { return high_key + round * 0xbb67ae85u; }
};
// The same from shared memory: registers cannot hold them all, and a loop would compute them again.
struct __align__(16) RoundKeys {
    uint2 of_round[kPhiloxRounds];

    __device__ __forceinline__ unsigned low(int round) const { return of_round[round].x; }
    __device__ __forceinline__ unsigned high(int round) const { return of_round[round].y; }
};

// Philox4x32-10 (Salmon et al., SC 2011): 4 × 32 random bits for a key and a counter.
template <class Keys>
__device__ __forceinline__ uint4 philox(const Keys& keys, unsigned counter_0, unsigned counter_1) {
    uint4 c = make_uint4(counter_0, counter_1, 0u, 0u);
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const unsigned high_0 = __umulhi(0xd2511f53u, c.x), low_0 = 0xd2511f53u * c.x;
        const unsigned high_1 = __umulhi(0xcd9e8d57u, c.z), low_1 = 0xcd9e8d57u * c.z;
        c = make_uint4(high_1 ^ c.y ^ keys.low(round), low_1, high_0 ^ c.w ^ keys.high(round), low_0);
    }
    return c;
}

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

// A draw is logit / T + Gumbel noise of (seed, position, token); the argmax of the draws has the distribution of the
// softmax.
__device__ __forceinline__ unsigned long long draw_with(unsigned bits, const SlotParams& params, float logit,
                                                        int token) {
    return candidate(fmaf(logit, params.inverse_temperature, gumbel(bits)), token);
}

// The draw of one token.
__device__ __forceinline__ unsigned long long draw(const SlotParams& params, int position, float logit, int token) {
    const uint4 random = philox(PhiloxKey{params.seed_low, params.seed_high}, position, token / 4);
    const unsigned low = token & 1 ? random.y : random.x, high = token & 1 ? random.w : random.z;
    return draw_with(token & 2 ? high : low, params, logit, token);
}

// The best draw of a warp's tokens. Noise is computed only for tokens that may beat the best draw so far.
struct WarpDraw {
    const SlotParams& params;
    const RoundKeys& keys;
    int position;
    unsigned long long best;  // of this lane
    float best_score;         // of the warp
    float slope, least;       // see may_win

    // keys: shared memory, which this fills. All threads of the block call.
    __device__ __forceinline__ WarpDraw(const SlotParams& params, RoundKeys& keys, int position)
        : params(params), keys(keys), position(position), best(0), best_score(-infinity()),
          slope(params.inverse_temperature * kLog2E), least(-infinity()) {
        const PhiloxKey key{params.seed_low, params.seed_high};
        const int round = threadIdx.x;
        if (round < kPhiloxRounds) keys.of_round[round] = make_uint2(key.low(round), key.high(round));
        __syncthreads();
    }

    // Add tokens first to first + 7 of each lane; return whether one of them might have won. NaN and infinity might. The
    // whole warp calls.
    __device__ __forceinline__ bool add(int first, const float (&x)[8]) {
        unsigned bits[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 random = philox(keys, position, unsigned(first) / 4 + half);
            unsigned* four = bits + 4 * half;
            four[0] = random.x, four[1] = random.y, four[2] = random.z, four[3] = random.w;
        }
        float top = -infinity();
#pragma unroll
        for (int j = 0; j < 8; ++j) top = max_or_nan(top, most(x[j], bits[j]));
        if (!__any_sync(kWholeWarp, may_win(top))) return false;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const bool is_drawn = may_win(most(x[j], bits[j])) && x[j] > -infinity();
            if (!__any_sync(kWholeWarp, is_drawn)) continue;
            const unsigned long long drawn = is_drawn ? draw_with(bits[j], params, x[j], first + j) : 0;
            best = Largest{}(best, drawn);
            raise(score_of((unsigned long long)(__reduce_max_sync(kWholeWarp, unsigned(drawn >> 32))) << 32));
        }
        return true;
    }

  private:
    // False only if the draw is less than the best one: noise is at most -log(u), and u at least bits / 2^32, so that
    // x / T - log(bits / 2^32) is not less than the best score where the draw is not. NaN counts as true.
    __device__ __forceinline__ float most(float x, unsigned bits) const {
        return fmaf(x, slope, -lg2_approx(float(bits)));
    }
    __device__ __forceinline__ bool may_win(float most) const { return !(most < least); }

    __device__ __forceinline__ void raise(float score) {
        best_score = fmaxf(best_score, score);
        // A margin for rounding, which is relative to the score where temperatures are low.
        least = best_score * kLog2E - 32.0f - (0.01f + 2e-6f * (fabsf(best_score) + 32.0f));
    }
};

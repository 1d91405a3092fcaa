// Log probabilities of the sampled token and of the most likely or given tokens, from the raw logits.

#include "sampling/logits.cuh"
#include "common/reduce.cuh"

constexpr int kThreads = 1024;

// The best candidate of this thread's share of the row that is less than `below`.
__device__ __forceinline__ unsigned long long best_below(const Act* row, int vocab_size, unsigned long long below) {
    unsigned long long best = 0;
    for (int first = threadIdx.x * 8; first < vocab_size; first += kThreads * 8) {
        float x[8];
        load_logits(row, vocab_size, first, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const unsigned long long one = candidate(x[j], first + j);
            if (one < below && first + j < vocab_size) best = Largest{}(best, one);
        }
    }
    return best;
}

// One block per row that reports log probabilities. logits [L, logits_stride], tokens [L]; rows [K], -1 is padding.
// chosen and ranks [K]; top_ids and top [K, width]. named [K, width] are tokens to report, -1 is padding; a row that
// begins with -1, or any if has_named is 0, gets its num_likeliest most likely tokens, at most width and vocab_size.
// Unused columns, and those of a row without a token, get NaN and ids of -1; such a row has rank 0.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    log_probabilities(const Act* __restrict__ logits, long long logits_stride, int vocab_size,
                      const int* __restrict__ tokens, const int* __restrict__ rows, float* __restrict__ chosen,
                      int* __restrict__ ranks, int* __restrict__ top_ids, float* __restrict__ top, int width,
                      const int* __restrict__ named, int has_named, int num_likeliest) {
    __shared__ unsigned long long best_of_warp[2][kMaxWarps];
    __shared__ float sum_of_warp[kMaxWarps];
    __shared__ int rank_of_warp[kMaxWarps];
    const int row_index = rows[blockIdx.x];
    if (row_index < 0) return;
    const int token = tokens[row_index];
    top_ids += (long long)(blockIdx.x) * width;
    top += (long long)(blockIdx.x) * width;
    const float nan = __uint_as_float(0x7fc00000u);
    if (token < 0) {
        for (int i = threadIdx.x; i < width; i += kThreads) top_ids[i] = -1, top[i] = nan;
        if (threadIdx.x == 0) chosen[blockIdx.x] = nan, ranks[blockIdx.x] = 0;
        return;
    }
    const Act* row = logits + row_index * logits_stride;
    const float own = to_float(row[token]);
    unsigned long long mine = best_below(row, vocab_size, ~0ull);
    unsigned long long best = reduce_block(mine, best_of_warp[1], Largest{});
    const float peak = score_of(best);

    float sum = 0.0f;
    int rank = 0;
    for (int first = threadIdx.x * 8; first < vocab_size; first += kThreads * 8) {
        float x[8];
        load_logits(row, vocab_size, first, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            sum += expf(x[j] - peak);
            rank += first + j < vocab_size && x[j] >= own;
        }
    }
    sum = reduce_block(sum, sum_of_warp, Sum{});
    rank = reduce_block(rank, rank_of_warp, Sum{});
    const float log_sum = logf(sum);
    if (threadIdx.x == 0) chosen[blockIdx.x] = own - peak - log_sum, ranks[blockIdx.x] = rank;
    if (has_named) named += (long long)(blockIdx.x) * width;
    const bool names_tokens = has_named && named[0] >= 0;
    for (int i = threadIdx.x + (names_tokens ? 0 : num_likeliest); i < width; i += kThreads) {
        const int id = names_tokens ? named[i] : -1;
        top_ids[i] = id, top[i] = id < 0 ? nan : to_float(row[id]) - peak - log_sum;
    }
    if (names_tokens) return;
    // A tournament: each thread enters the best candidate of its share, and the winner then enters its next one.
    for (int i = 0; i < num_likeliest; ++i) {
        best = reduce_block(mine, best_of_warp[i % 2], Largest{});
        if (threadIdx.x == 0) top_ids[i] = token_of(best), top[i] = score_of(best) - peak - log_sum;
        if (mine == best) mine = best_below(row, vocab_size, best);
    }
}

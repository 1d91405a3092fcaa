// Log probabilities of the sampled token and of the most likely tokens, from the raw logits.

#include "logits.cuh"
#include "reduce.cuh"

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
// chosen and ranks [K]; top_ids and top [K, width], width at most vocab_size. A row without a token gets NaN, rank 0
// and ids of -1.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    log_probabilities(const Act* __restrict__ logits, long long logits_stride, int vocab_size,
                      const int* __restrict__ tokens, const int* __restrict__ rows, float* __restrict__ chosen,
                      int* __restrict__ ranks, int* __restrict__ top_ids, float* __restrict__ top, int width) {
    __shared__ unsigned long long best_of_warp[2][kMaxWarps];
    __shared__ float sum_of_warp[kMaxWarps];
    __shared__ int rank_of_warp[kMaxWarps];
    const int row_index = rows[blockIdx.x];
    if (row_index < 0) return;
    const int token = tokens[row_index];
    top_ids += (long long)(blockIdx.x) * width;
    top += (long long)(blockIdx.x) * width;
    if (token < 0) {
        const float nan = __uint_as_float(0x7fc00000u);
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
    // A tournament: each thread enters the best candidate of its share, and the winner then enters its next one.
    for (int i = 0; i < width; ++i) {
        best = reduce_block(mine, best_of_warp[i % 2], Largest{});
        if (threadIdx.x == 0) top_ids[i] = token_of(best), top[i] = score_of(best) - peak - log_sum;
        if (mine == best) mine = best_below(row, vocab_size, best);
    }
}

// Samples a token for each row. For rows with filters, filters.cu computes which tokens may be drawn. Blocks of 256
// threads: x segments of a row, y rows.

#include "sampling.cuh"

// Samples rows without filters, and finds the peak of the others. A row whose peak is not finite gets -1.
extern "C" __global__ void __launch_bounds__(kThreads, 2) scan_rows(STEP_PARAMETERS) {
    __shared__ __align__(16) float segment_biases[kSegment];
    __shared__ unsigned long long best_of_warp[kMaxWarps];
    __shared__ unsigned largest_of_warp[kMaxWarps];
    const Step step = STEP;
    const int slot = step.slots[blockIdx.y];
    if (slot < 0) return;
    const SlotParams params = step.slot_params[slot];
    const int position = step.position();
    RowState& state = step.states[blockIdx.y];

    unsigned long long best = 0;
    float peak = -infinity();
    bool has_nan = false;
    for_segment(step.row(slot, params, segment_biases), [&](int first, const float(&x)[8]) {
        float top = -infinity();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            has_nan |= x[j] != x[j];
            top = fmaxf(top, x[j]);
        }
        if (params.inverse_temperature > 0.0f) {
            if (!params.is_filtered) best = draw(params, position, first, x, best);
        } else if (top > peak) {
            int token = first;
#pragma unroll
            for (int j = 7; j >= 0; --j) token = x[j] == top ? first + j : token;
            best = candidate(top, token);
        }
        peak = fmaxf(peak, top);
    });
    best = reduce_block(best, best_of_warp, Largest{});
    unsigned largest = has_nan ? kNotANumber : order_of(peak);
    largest = reduce_block(largest, largest_of_warp, Largest{});
    if (threadIdx.x == 0) {
        atomicMax(&state.best, best);
        atomicMax(&state.largest, largest);
    }
    if (!is_last_of_row(state) || threadIdx.x != 0) return;
    largest = __ldcg(&state.largest);
    best = __ldcg(&state.best);
    const bool is_finite = largest > order_of(-infinity()) && largest < order_of(infinity());
    const bool draws = is_finite && params.is_filtered;
    state.best = 0;
    state.largest = 0;
    state.draws = draws;
    state.peak = number_of(largest);
    state.largest_gap = infinity();
    state.largest_deviation = infinity();
    state.mean_gap = 0.0f;
    if (!draws) step.finish(slot, params, is_finite ? token_of(best) : -1);
}

// Draws from the tokens that passed the filters, in rows with filters. min_p, the last filter, applies here. If no
// token passes it, because another filter removed the peak, the most likely remaining token is taken.
extern "C" __global__ void __launch_bounds__(kThreads, 2) draw_rows(STEP_PARAMETERS) {
    __shared__ __align__(16) float segment_biases[kSegment];
    __shared__ unsigned long long best_of_warp[kMaxWarps], likeliest_of_warp[kMaxWarps];
    const Step step = STEP;
    const int slot = step.slots[blockIdx.y];
    if (slot < 0 || !step.states[blockIdx.y].draws) return;
    const SlotParams params = step.slot_params[slot];
    const int position = step.position();
    RowState& state = step.states[blockIdx.y];
    const Kept kept(state, params);

    unsigned long long best = 0, likeliest = 0;
    for_segment(step.row(slot, params, segment_biases), [&](int first, const float(&x)[8]) {
        float survivors[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const bool is_left = kept.has(x[j]) && x[j] > -infinity();
            if (is_left) likeliest = Largest{}(likeliest, candidate(x[j], first + j));
            survivors[j] = is_left && kept.gap(x[j]) <= params.largest_gap ? x[j] : -infinity();
        }
        best = draw(params, position, first, survivors, best);
    });
    best = reduce_block(best, best_of_warp, Largest{});
    likeliest = reduce_block(likeliest, likeliest_of_warp, Largest{});
    if (threadIdx.x == 0) {
        atomicMax(&state.best, best);
        atomicMax(&state.likeliest, likeliest);
    }
    if (!is_last_of_row(state) || threadIdx.x != 0) return;
    best = __ldcg(&state.best);
    if (best == 0) best = __ldcg(&state.likeliest);
    state.best = 0;
    state.likeliest = 0;
    step.finish(slot, params, token_of(best));
}

// Samples a token for each row without filters. For rows with filters, lists the tokens that may pass them; filters.cu
// draws from the list. Blocks of 256 threads: x segments of a row, y rows.

#include "sampling/thresholds.cuh"

constexpr int kStaged = 2048;  // tokens that a block lists before it writes them to the row's list

// Samples rows without filters. Of the others it finds the peak, and how far from it tokens may be to pass the filters.
// A row whose peak is not finite gets -1.
extern "C" __global__ void __launch_bounds__(kThreads, 4) scan_rows(STEP_PARAMETERS) {
    __shared__ __align__(16) float biases[kChunk];
    __shared__ unsigned long long best_of_warp[kMaxWarps];
    __shared__ unsigned largest_of_warp[kMaxWarps];
    __shared__ ReachSearch search;
    __shared__ RoundKeys keys;
    const Step step = STEP;
    const int slot = step.slots[blockIdx.y];
    if (slot < 0) return;
    const SlotParams params = step.slot_params[slot];
    RowState& state = step.states[blockIdx.y];
    const Row row = step.row(slot, params, biases);

    const bool is_greedy = params.inverse_temperature == 0.0f, is_plain = !is_greedy && !params.is_filtered;
    float peak = -infinity();
    WarpDraw draws(params, keys, step.position());
    const int2 segment = segment_of(row);
    for_tokens(row, segment.x, segment.y, [&](int own, const float(&x)[kTurns][8]) {
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const int first = own + turn * kTurnTokens;
            // Tokens that cannot win are not needed for the peak: whether it is finite depends on the others.
            if (is_plain && !draws.add(first, x[turn])) continue;
            const float top = largest_of(x[turn]);
            if (is_greedy && top > peak) draws.best = candidate(top, first + place_of(top, x[turn]));
            peak = max_or_nan(peak, top);
        }
    });
    if (params.is_filtered) step.row_group_peaks()[blockIdx.x * kThreads + threadIdx.x] = peak;
    unsigned long long best = reduce_block(draws.best, best_of_warp, Largest{});
    const unsigned own_largest = reduce_block(order_of(peak), largest_of_warp, Largest{});
    if (threadIdx.x == 0) {
        atomicMax(&state.best, best);
        atomicMax(&state.largest, own_largest);
    }
    if (!is_last_of_row(state)) return;
    const unsigned largest = __ldcg(&state.largest);
    best = __ldcg(&state.best);
    const bool is_finite = largest > order_of(-infinity()) && largest < order_of(infinity());
    const bool is_drawn_later = is_finite && params.is_filtered;
    float reach = 0.0f;
    if (is_drawn_later) {
        const GroupPeaks peaks{step.row_group_peaks(), int(gridDim.x) * kThreads};
        reach = find_reach(search, peaks, params, Kept(number_of(largest), params.inverse_temperature));
    }
    __syncthreads();  // all threads have read the state
    if (threadIdx.x != 0) return;
    state.best = 0;
    state.largest = 0;
    state.draws = is_drawn_later;
    state.peak = number_of(largest);
    state.reach = reach;
    if (!is_drawn_later) step.finish(slot, params, is_finite ? token_of(best) : -1);
}

constexpr int kListBlocks = ACT == 1 ? 4 : 3;  // of a multiprocessor; other logits than bf16 take more registers

// A block's part of a list, in shared memory. Tokens that do not fit go to the row's list at once.
struct Staged {
    uint2 entries[kStaged];
    unsigned count, place;
};

// Lists the tokens of rows with filters that are within their reach, and sums up the probability mass of all tokens for
// rows whose first filter needs it.
extern "C" __global__ void __launch_bounds__(kThreads, kListBlocks) list_tokens(STEP_PARAMETERS) {
    __shared__ __align__(16) float biases[kChunk];
    __shared__ SumsOfWarps of_warps;
    __shared__ Staged staged;
    const Step step = STEP;
    const int slot = step.slots[blockIdx.y];
    if (slot < 0 || !step.states[blockIdx.y].draws) return;
    const SlotParams params = step.slot_params[slot];
    RowState& state = step.states[blockIdx.y];
    const Kept all(state.peak, params.inverse_temperature);
    const float reach = state.reach;
    const bool adds_mass = needs_sums(params), adds_gaps = adds_mass && params.typical_p < 1.0f;
    if (threadIdx.x == 0) staged.count = 0;
    __syncthreads();
    const auto list = [&](unsigned place, uint2 entry) {
        if (place < unsigned(step.list_size)) step.list()[place] = entry;
    };
    Sums sums;
    const Row row = step.row(slot, params, biases);
    const int2 segment = segment_of(row);
    for_eights(row, segment.x, segment.y, [&](int first, const float(&x)[8]) {
        if (adds_gaps) {
#pragma unroll
            for (int j = 0; j < 8; ++j) sums.add(all, x[j]);
        } else if (adds_mass) {
#pragma unroll
            for (int j = 0; j < 8; ++j) sums.mass += mass_of(all.scaled_gap(x[j]));
        }
        if (!(all.gap(largest_of(x)) <= reach)) return;
        unsigned count = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) count += all.gap(x[j]) <= reach;
        unsigned place = atomicAdd(&staged.count, count);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (!(all.gap(x[j]) <= reach)) continue;
            const uint2 entry = make_uint2(__float_as_uint(x[j]), first + j);
            if (place < kStaged) {
                staged.entries[place] = entry;
            } else {
                list(atomicAdd(&state.num_listed, 1u), entry);
            }
            ++place;
        }
    });
    __syncthreads();
    const unsigned count = min(staged.count, unsigned(kStaged));
    if (threadIdx.x == 0 && count > 0) staged.place = atomicAdd(&state.num_listed, count);
    __syncthreads();
    for (unsigned i = threadIdx.x; i < count; i += kThreads) list(staged.place + i, staged.entries[i]);
    if (!adds_mass) return;
    sums = reduce_sums(sums, of_warps);
    if (threadIdx.x != 0) return;
    atomicAdd(&state.mass, sums.mass);
    if (adds_gaps) atomicAdd(&state.gap_mass, sums.gap_mass);
}

// Top-k, typical-p and top-p without a sort. Each filter keeps the tokens whose key is at most a threshold, ties
// included. A key is the bits of a non-negative float. The threshold is found in three levels, of 11, 10 and 10 bits,
// each from a histogram over the tokens that share the bits found so far: of their count (top-k) or of their
// probability mass. Mass is an integer multiple of 2^-38 of the peak's mass, so sums do not depend on their order and
// the levels agree.

#include "sampling.cuh"

constexpr float kWholeMass = 274877906944.0f;  // 2^38
constexpr int kHalfMassBits = 19;              // mass is summed in two halves, so that 32 bits hold a segment's sums

// e^-scaled_gap
__device__ __forceinline__ unsigned long long mass_of(float scaled_gap) {
    return (unsigned long long)(ex2_approx(scaled_gap * -kLog2E) * kWholeMass);
}

// Prefix sum over the block: `before` is the sum of x of all earlier threads, total of all threads.
__device__ __forceinline__ void scan_block(unsigned long long x, unsigned long long* total_of_warp,
                                           unsigned long long& before, unsigned long long& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned long long sum = x;
    for (int step = 1; step < 32; step *= 2) {
        const unsigned long long other = __shfl_up_sync(kWholeWarp, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) total_of_warp[warp] = sum;
    __syncthreads();
    before = sum - x;
    total = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
        if (w < warp) before += total_of_warp[w];
        total += total_of_warp[w];
    }
}

// The mean of the scaled gaps under the distribution after top-k: its entropy, up to a constant.
extern "C" __global__ void __launch_bounds__(kThreads, 2) mean_gaps(STEP_PARAMETERS) {
    __shared__ __align__(16) float segment_biases[kSegment];
    __shared__ unsigned long long sum_of_warp[2][kMaxWarps];
    const Step step = STEP;
    const int slot = step.slots[blockIdx.y];
    if (slot < 0 || !step.states[blockIdx.y].draws) return;
    const SlotParams params = step.slot_params[slot];
    if (params.typical_p >= 1.0f) return;
    RowState& state = step.states[blockIdx.y];
    const Kept kept(state, params);
    unsigned long long mass = 0, gap_mass = 0;
    for_segment(step.row(slot, params, segment_biases), [&](int, const float(&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float scaled = kept.scaled_gap(x[j]);
            if (!kept.has(x[j]) || scaled > 80.0f) continue;
            const unsigned long long one = mass_of(scaled);
            mass += one;
            gap_mass += (unsigned long long)(float(one) * scaled);
        }
    });
    mass = reduce_block(mass, sum_of_warp[0], Sum{});
    gap_mass = reduce_block(gap_mass, sum_of_warp[1], Sum{});
    if (threadIdx.x == 0) {
        atomicAdd(&state.mass, mass);
        atomicAdd(&state.gap_mass, gap_mass);
    }
    if (!is_last_of_row(state) || threadIdx.x != 0) return;
    state.mean_gap = float(double(__ldcg(&state.gap_mass)) / double(__ldcg(&state.mass)));
    state.mass = 0;
    state.gap_mass = 0;
}

enum Filter { kTopK, kTypical, kTopP };  // in the order in which they apply; see step/device_sampler.py

__device__ __forceinline__ bool is_on(const SlotParams& params, int filter) {
    return filter == kTopK ? params.top_k > 0 : filter == kTypical ? params.typical_p < 1.0f : params.top_p < 1.0f;
}

// The minimum of `total` that the filter keeps.
__device__ __forceinline__ unsigned long long target_of(const SlotParams& params, int filter,
                                                        unsigned long long total) {
    if (filter == kTopK) return params.top_k;
    const double share = filter == kTypical ? params.typical_p : params.top_p, exact = share * double(total);
    const unsigned long long whole = (unsigned long long)(exact);
    return max(whole + (double(whole) < exact), 1ull);
}

// One level of one filter, for the rows that have it. histograms [L, kBins]: zeros before and after.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    filter_level(STEP_PARAMETERS, unsigned long long* histograms, int filter, int level) {
    __shared__ __align__(16) float segment_biases[kSegment];
    __shared__ unsigned low_halves[kBins], high_halves[kBins];
    __shared__ unsigned long long total_of_warp[kThreads / 32];
    const Step step = STEP;
    const int slot = step.slots[blockIdx.y];
    if (slot < 0 || !step.states[blockIdx.y].draws) return;
    const SlotParams params = step.slot_params[slot];
    if (!is_on(params, filter)) return;
    RowState& state = step.states[blockIdx.y];
    const Kept kept(state, params);
    const unsigned prefix = state.prefix;
    const int num_bins = level == 0 ? kBins : kBins / 2, bits_below = 20 - 10 * level;

    for (int bin = threadIdx.x; bin < num_bins; bin += kThreads) low_halves[bin] = high_halves[bin] = 0;
    __syncthreads();
    for_segment(step.row(slot, params, segment_biases), [&](int first, const float(&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (first + j >= step.vocab_size || !kept.has(x[j])) continue;
            const float scaled = kept.scaled_gap(x[j]);
            const unsigned key = __float_as_uint(filter == kTypical ? kept.deviation(x[j]) : kept.gap(x[j]));
            const unsigned bin = key >> bits_below & num_bins - 1;
            if (level > 0 && key >> bits_below >> 10 != prefix) continue;
            if (filter == kTopK) {
                atomicAdd(&low_halves[bin], 1u);
            } else if (scaled < 80.0f) {
                const unsigned long long mass = mass_of(scaled);
                const unsigned low = unsigned(mass) & (1u << kHalfMassBits) - 1, high = unsigned(mass >> kHalfMassBits);
                if (low) atomicAdd(&low_halves[bin], low);
                if (high) atomicAdd(&high_halves[bin], high);
            }
        }
    });
    __syncthreads();
    unsigned long long* histogram = histograms + (long long)(blockIdx.y) * kBins;
    for (int bin = threadIdx.x; bin < num_bins; bin += kThreads) {
        const unsigned long long content = low_halves[bin] + ((unsigned long long)(high_halves[bin]) << kHalfMassBits);
        if (content) atomicAdd(&histogram[bin], content);
    }
    if (!is_last_of_row(state)) return;

    const int bins_each = num_bins / kThreads;
    histogram += threadIdx.x * bins_each;
    unsigned long long mine = 0, before, total;
    for (int i = 0; i < bins_each; ++i) mine += __ldcg(&histogram[i]);
    scan_block(mine, total_of_warp, before, total);
    const unsigned long long target = level == 0 ? target_of(params, filter, total) : state.target;
    int found = -1;
    for (int i = 0; i < bins_each; ++i) {
        const unsigned long long content = __ldcg(&histogram[i]);
        if (before < target && target <= before + content) {
            found = threadIdx.x * bins_each + i;
            break;
        }
        before += content;
    }
    for (int i = 0; i < bins_each; ++i) histogram[i] = 0;
    __syncthreads();  // all threads have read state.target
    if (found < 0) return;
    const unsigned key = level == 0 ? found : prefix << 10 | found;
    state.prefix = key;
    state.target = target - before;
    if (level < 2) return;
    if (filter == kTypical) {
        state.largest_deviation = __uint_as_float(key);
    } else {
        state.largest_gap = __uint_as_float(key);
    }
}

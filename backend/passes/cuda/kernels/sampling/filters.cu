// Applies the filters of rows that have some, and draws. Usually all tokens that may pass are in the list that list_tokens
// has made. If they are too many for it, or it turns out to lack some, the whole row is read again, several times. Both
// give the same token. Blocks of 256 threads.

#include "sampling/thresholds.cuh"

// A row's list. A thread has several entries on their way at once.
struct Listed {
    static constexpr int kAtOnce = 4;
    const uint2* list;
    int count;

    template <class F> __device__ __forceinline__ void operator()(const F& each) const {
#pragma unroll 1
        for (int first = threadIdx.x; first < count; first += kAtOnce * kThreads) {
            uint2 entries[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (first + i * kThreads < count) entries[i] = __ldcg(list + first + i * kThreads);
#pragma unroll 1
            for (int i = 0; i < kAtOnce && first + i * kThreads < count; ++i) {
                each(__uint_as_float(entries[0].x), int(entries[0].y));
#pragma unroll
                for (int j = 1; j < kAtOnce; ++j) entries[j - 1] = entries[j];
            }
        }
    }
};

// All tokens of a row. All threads of the block call.
struct Whole {
    const Row& row;

    template <class F> __device__ __forceinline__ void operator()(const F& each) const {
        for_eights(row, 0, row.vocab_size, [&](int first, const float(&x)[8]) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (x[j] > -infinity()) each(x[j], first + j);
        });
    }
};

__device__ __forceinline__ bool is_on(const SlotParams& params, int filter) {
    return filter == kTopK ? params.top_k > 0 : filter == kTypical ? params.typical_p < 1.0f : params.top_p < 1.0f;
}

// Let `kept` be what the filters before min-p keep. source has all tokens with a gap of at most `reach`, and maybe no
// others; false if it may lack tokens that the filters keep. sums: over the row, if they are needed. All threads of the
// block call.
template <class Source>
__device__ __forceinline__ bool apply_filters(Search& search, SumsOfWarps& of_warps, const Source& source, float reach,
                                              const SlotParams& params, Sums sums, Kept& kept) {
#pragma unroll 1
    for (int filter = kTopK; filter <= kTopP; ++filter) {
        if (!is_on(params, filter)) continue;
        const bool is_first = params.top_k == 0 && (filter == kTypical || params.typical_p >= 1.0f);
        if (filter == kTypical) {
            if (!is_first) {
                sums = Sums{};
                source([&](float x, int) { sums.add(kept, x); });
                sums = reduce_sums(sums, of_warps);
            }
            kept.mean_gap = sums.mean();
        }
        const Goal goal{filter == kTopK ? params.top_k : 0, filter == kTypical ? params.typical_p : params.top_p,
                        is_first ? sums.mass : 0};
        float threshold;
        if (!find_threshold(search, source, kept, filter, goal, threshold)) {
            if (filter == kTopK && reach >= kLargestFloat) continue;  // it keeps all tokens
            return false;
        }
        if (filter != kTypical) {
            kept.largest_gap = threshold;
            continue;
        }
        // Tokens beyond the reach deviate at least as much as one at the reach does, if that is beyond the mean.
        const float at_reach = kept.peak - reach;
        const bool has_all = kept.scaled_gap(at_reach) >= kept.mean_gap && threshold < kept.deviation(at_reach);
        if (is_first && !has_all) return false;
        kept.largest_deviation = threshold;
    }
    return true;
}

// The best draws of a thread's tokens that pass all filters. min-p, the last filter, applies here.
struct KeptDraws {
    unsigned long long best = 0, likeliest = 0;  // likeliest: of the tokens that pass the filters before min-p

    __device__ __forceinline__ void add(const Listed& listed, const Kept& kept, const SlotParams& params,
                                        int position) {
        listed([&](float x, int token) {
            if (!kept.has(x)) return;
            likeliest = Largest{}(likeliest, candidate(x, token));
            if (kept.gap(x) <= params.largest_gap) best = Largest{}(best, draw(params, position, x, token));
        });
    }
    __device__ __forceinline__ void add(const Whole& whole, const Kept& kept, const SlotParams& params, RoundKeys& keys,
                                        int position) {
        WarpDraw draws(params, keys, position);
        float peak = -infinity();
        for_eights(whole.row, 0, whole.row.vocab_size, [&](int first, const float(&x)[8]) {
            float drawn[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) drawn[j] = kept.has(x[j]) ? x[j] : -infinity();
            const float top = largest_of(drawn);
            if (top > peak) {
                peak = top;
                likeliest = candidate(top, first + place_of(top, drawn));
            }
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (!(kept.gap(x[j]) <= params.largest_gap)) drawn[j] = -infinity();
            draws.add(first, drawn);
        });
        best = draws.best;
    }
    // The row's token. If none passes min-p, because another filter removed the peak, it is the most likely one of the
    // others. All threads of the block call.
    __device__ __forceinline__ int token(SumsOfWarps& of_warps) const {
        const unsigned long long best_of_row = reduce_block(best, of_warps.mass, Largest{});
        const unsigned long long likeliest_of_row = reduce_block(likeliest, of_warps.gap_mass, Largest{});
        return token_of(best_of_row != 0 ? best_of_row : likeliest_of_row);
    }
};

// Draws a token for each row that scan_rows has left. Blocks: rows.
extern "C" __global__ void __launch_bounds__(kThreads, 2) filter_rows(STEP_PARAMETERS) {
    __shared__ __align__(16) float biases[kChunk];
    __shared__ Search search;
    __shared__ SumsOfWarps of_warps;
    __shared__ RoundKeys keys;
    const Step step = STEP;
    const int slot = step.slots[blockIdx.y];
    if (slot < 0 || !step.states[blockIdx.y].draws) return;
    const SlotParams params = step.slot_params[slot];
    RowState& state = step.states[blockIdx.y];
    const Sums sums{state.mass, state.gap_mass};
    const Listed listed{step.list(), int(state.num_listed)};
    const Kept all(state.peak, params.inverse_temperature);
    const int position = step.position();
    Kept kept = all;
    KeptDraws draws;
    if (listed.count <= step.list_size && apply_filters(search, of_warps, listed, state.reach, params, sums, kept)) {
        draws.add(listed, kept, params, position);
    } else {
        const Row row = step.row(slot, params, biases);
        const Whole whole{row};
        kept = all;
        apply_filters(search, of_warps, whole, infinity(), params, sums, kept);
        draws.add(whole, kept, params, keys, position);
    }
    const int token = draws.token(of_warps);
    if (threadIdx.x != 0) return;
    state.mass = 0;
    state.gap_mass = 0;
    state.num_listed = 0;
    state.mean_gap = kept.mean_gap;
    state.largest_gap = kept.largest_gap;
    state.largest_deviation = kept.largest_deviation;
    step.finish(slot, params, token);
}

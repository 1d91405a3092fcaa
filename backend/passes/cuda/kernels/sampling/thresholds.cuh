// Thresholds of top-k, typical-p and top-p without a sort. Each filter keeps the tokens whose key is at most a threshold,
// ties included. A key is the bits of a non-negative float. A block finds the threshold in three levels, of 11, 10 and 10
// bits, each from a histogram over the tokens that share the bits found so far: of their count (top-k) or of their
// probability mass. Mass is an integer multiple of 2^-38 of the peak's mass, so sums do not depend on their order and the
// levels agree.

#pragma once

#include "sampling/sampling.cuh"

constexpr int kBins = 2048;                    // of the first level; the others have half as many
constexpr int kBinsEach = kBins / kThreads;
constexpr float kWholeMass = 274877906944.0f;  // 2^38

enum Filter { kTopK, kTypical, kTopP };  // in the order in which they apply

// 64-bit sums in shared memory, which has no such atomics: whoever makes the low half wrap carries to the high half. So
// most tokens take one atomic, and the sums do not depend on their order.
struct __align__(16) Histogram {
    unsigned low[kBins], high[kBins];

    // All threads of the block call, and then a barrier.
    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < kBins / 4; i += kThreads) {
            reinterpret_cast<uint4*>(low)[i] = make_uint4(0, 0, 0, 0);
            reinterpret_cast<uint4*>(high)[i] = make_uint4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ void add(int bin, unsigned long long content) {
        const unsigned added = unsigned(content), before = atomicAdd(&low[bin], added);
        const unsigned carried = unsigned(content >> 32) + (before + added < before);
        if (carried != 0) atomicAdd(&high[bin], carried);
    }
    // The contents of the thread's bins, from kBinsEach * threadIdx.x.
    __device__ __forceinline__ void read(unsigned long long (&contents)[kBinsEach]) const {
#pragma unroll
        for (int i = 0; i < kBinsEach; i += 4) {
            const int bin = threadIdx.x * kBinsEach + i;
            const uint4 a = *reinterpret_cast<const uint4*>(low + bin), b = *reinterpret_cast<const uint4*>(high + bin);
            contents[i] = (unsigned long long)(b.x) << 32 | a.x;
            contents[i + 1] = (unsigned long long)(b.y) << 32 | a.y;
            contents[i + 2] = (unsigned long long)(b.z) << 32 | a.z;
            contents[i + 3] = (unsigned long long)(b.w) << 32 | a.w;
        }
    }
};

// What find_threshold shares in a block.
struct Search {
    Histogram histogram;
    unsigned long long total_of_warp[kThreads / 32];
    unsigned long long target;  // how much of the content is still to be found
    unsigned prefix;            // the key's bits found so far
};
constexpr unsigned kNotFound = 0xffffffffu;

// e^-scaled_gap
__device__ __forceinline__ unsigned long long mass_of(float scaled_gap) {
    return (unsigned long long)(ex2_approx(scaled_gap * -kLog2E) * kWholeMass);
}

// Probability mass, and the sum of scaled gaps times mass.
struct Sums {
    unsigned long long mass = 0, gap_mass = 0;

    __device__ __forceinline__ void add(const Kept& kept, float x) {
        const float scaled = kept.scaled_gap(x);
        if (!kept.has(x) || scaled > 80.0f) return;
        const unsigned long long one = mass_of(scaled);
        mass += one;
        gap_mass += (unsigned long long)(float(one) * scaled);
    }
    // The mean of the scaled gaps: the distribution's entropy, up to a constant.
    __device__ __forceinline__ float mean() const { return float(double(gap_mass) / double(mass)); }
};

// What reduce_sums shares in a block.
struct SumsOfWarps {
    unsigned long long mass[kMaxWarps], gap_mass[kMaxWarps];
};

__device__ __forceinline__ Sums reduce_sums(const Sums& sums, SumsOfWarps& of_warps) {
    return {reduce_block(sums.mass, of_warps.mass, Sum{}), reduce_block(sums.gap_mass, of_warps.gap_mass, Sum{})};
}

// The least content that a filter keeps: a number of tokens, or a share of `total`.
struct Goal {
    int count;
    double share;
    unsigned long long whole;  // the total; 0: that of the source

    __device__ __forceinline__ unsigned long long of(unsigned long long total) const {
        if (count > 0) return count;
        const double exact = share * double(whole > 0 ? whole : total);
        const unsigned long long floor = (unsigned long long)(exact);
        return max(floor + (double(floor) < exact), 1ull);
    }
};

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

// Write the threshold of a filter over the tokens of `source` that are kept so far; return false if their content is less
// than the goal. source(each) calls each(x, token) for every token of the thread's share. All threads of the block call,
// and get the same result.
template <class Source>
__device__ __forceinline__ bool find_threshold(Search& search, const Source& source, const Kept& kept, int filter,
                                               const Goal& goal, float& threshold) {
    unsigned prefix = 0;
    unsigned long long target = 0;
#pragma unroll 1
    for (int level = 0; level < 3; ++level) {
        const int num_bins = level == 0 ? kBins : kBins / 2, bits_below = 20 - 10 * level;
        search.histogram.clear();
        __syncthreads();
        source([&](float x, int) {
            if (!kept.has(x)) return;
            const unsigned key = __float_as_uint(filter == kTypical ? kept.deviation(x) : kept.gap(x));
            const unsigned bin = key >> bits_below & num_bins - 1;
            if (level > 0 && key >> bits_below >> 10 != prefix) return;
            const unsigned long long content = filter == kTopK ? 1 : mass_of(kept.scaled_gap(x));
            if (content != 0) search.histogram.add(bin, content);
        });
        __syncthreads();
        if (threadIdx.x == 0) search.prefix = kNotFound;
        unsigned long long contents[kBinsEach], own = 0, before, total;
        search.histogram.read(contents);
#pragma unroll
        for (int i = 0; i < kBinsEach; ++i) own += contents[i];
        scan_block(own, search.total_of_warp, before, total);
        if (level == 0) target = goal.of(total);
#pragma unroll
        for (int i = 0; i < kBinsEach; ++i) {
            if (before < target && target <= before + contents[i]) {
                search.prefix = prefix << 10 | unsigned(threadIdx.x * kBinsEach + i);
                search.target = target - before;
            }
            before += contents[i];
        }
        __syncthreads();
        prefix = search.prefix;
        if (prefix == kNotFound) return false;
        target = search.target;
    }
    threshold = __uint_as_float(prefix);
    return true;
}

// Whether top-p or typical-p is the first filter, so that it needs sums over the whole row.
__device__ __forceinline__ bool needs_sums(const SlotParams& params) {
    return params.top_k == 0 && (params.typical_p < 1.0f || params.top_p < 1.0f);
}

// The largest logits of scan_rows' threads, each of a group of tokens.
struct GroupPeaks {
    const float* peaks;
    int count;

    template <class F> __device__ __forceinline__ void operator()(const F& each) const {
        for (int i = threadIdx.x; i < count; i += kThreads) {
            const float x = __ldcg(peaks + i);
            if (x > -infinity()) each(x);
        }
    }
};

// What find_reach shares in a block.
struct ReachSearch {
    __align__(16) unsigned counts[kBins];
    unsigned long long total_of_warp[2][kThreads / 32];
    int bin;  // of the reach
};

// How far from the peak tokens are that the row's filters may keep: for top-k the end of the bin with the k-th largest
// peak, as many groups have a token that is no farther; for the others a guess, with bins of 1/64 of scaled gap. If
// groups were random, then among those whose peak is farther than a gap, as many tokens of each have that gap as do
// peaks: the share of the tokens there is (peaks there) / (peaks there or farther). So a peak stands for
// (groups) / (peaks there or farther) tokens, and the guess is by their mass.
__device__ __forceinline__ float find_reach(ReachSearch& search, const GroupPeaks& peaks, const SlotParams& params,
                                            const Kept& kept) {
    const bool is_top_k = params.top_k > 0;
    if (!is_top_k && params.typical_p >= 1.0f && params.top_p >= 1.0f) return params.largest_gap;  // min-p
    constexpr float kBinsOfOne = 64.0f;
    constexpr int kKeyBits = 20;
    uint4* const quads = reinterpret_cast<uint4*>(search.counts);
    for (int i = threadIdx.x; i < kBins / 4; i += kThreads) quads[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) search.bin = kBins;
    __syncthreads();
    peaks([&](float x) {
        const int bin = is_top_k ? int(__float_as_uint(kept.gap(x)) >> kKeyBits)
                                 : int(fminf(kept.scaled_gap(x) * kBinsOfOne, kBins - 1.0f));
        atomicAdd(&search.counts[bin], 1u);
    });
    __syncthreads();
    const int first = threadIdx.x * kBinsEach;
    const uint4 a = quads[first / 4], b = quads[first / 4 + 1];
    const unsigned counts[kBinsEach] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    unsigned long long own = 0, before, total;
#pragma unroll
    for (int i = 0; i < kBinsEach; ++i) own += counts[i];
    scan_block(own, search.total_of_warp[0], before, total);
    unsigned long long contents[kBinsEach], target = params.top_k;
    if (is_top_k) {
#pragma unroll
        for (int i = 0; i < kBinsEach; ++i) contents[i] = counts[i];
    } else {
        float farther = float(total - before) + 0.5f;
        own = 0;
#pragma unroll
        for (int i = 0; i < kBinsEach; ++i) {
            const float tokens = counts[i] * float(total) * rcp_approx(farther - 0.5f * counts[i]);
            farther -= counts[i];
            contents[i] = (unsigned long long)(tokens * ex2_approx((first + i + 0.5f) * (-kLog2E / kBinsOfOne)) *
                                               kWholeMass);
            own += contents[i];
        }
        scan_block(own, search.total_of_warp[1], before, total);
        // Typical-p may keep fewer of the likely tokens and more of the others.
        const float share = params.typical_p < 1.0f ? 1.0f - (1.0f - params.typical_p) / 16
                                                    : 1.0f - (1.0f - params.top_p) / 4;
        target = max((unsigned long long)(double(share) * double(total)), 1ull);
    }
#pragma unroll
    for (int i = 0; i < kBinsEach; ++i) {
        if (before < target && target <= before + contents[i]) search.bin = first + i;
        before += contents[i];
    }
    __syncthreads();
    const int bin = search.bin;
    if (bin >= kBins - 1) return kLargestFloat;
    return is_top_k ? __uint_as_float((bin + 1u << kKeyBits) - 1)
                    : float(bin + 1) / (kBinsOfOne * params.inverse_temperature);
}

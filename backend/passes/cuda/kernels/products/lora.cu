// LoRA: adds up (down x) of each token's adapter to the outputs of a linear.
//
// An adapter of a linear is an AdapterHeader in memory that all adapters share, and behind it
//   down  [ranks, filled up to a multiple of 4][inputs]
//   up    of each part [its ranks][its outputs, filled up to a multiple of 8]
// Each sum is computed by itself and in a fixed order, so a token's result has the same bits in any step. Neighbouring
// tokens with one adapter, as a prompt's, share what is read of it.

#include "common/reduce.cuh"
#include "common/values.cuh"

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTokens = 4;       // that share reads
constexpr int kRanksAtOnce = 4;  // of a warp
constexpr int kMaxParts = 4;

struct AdapterPart {
    int first_output, num_outputs, first_rank, num_ranks;
    int up;  // its place among the numbers
};

struct __align__(16) AdapterHeader {  // packed by memory/lora.py; the numbers follow
    int num_ranks, num_parts;
    AdapterPart parts[kMaxParts];
    int padding[10];

    __device__ __forceinline__ const Act* numbers() const { return reinterpret_cast<const Act*>(this + 1); }
};

// Finds adapters of tokens. places: by adapter, where the linear's part begins in memory; -1 if it has none.
struct Adapters {
    const unsigned char* memory;
    const long long* places;
    const int* of_tokens;
    int num_tokens;

    // Null for a token without one.
    __device__ __forceinline__ const AdapterHeader* of(int token) const {
        const int adapter = token < num_tokens ? of_tokens[token] : -1;
        const long long place = adapter < 0 ? -1 : places[adapter];
        return place < 0 ? nullptr : reinterpret_cast<const AdapterHeader*>(memory + place);
    }

    // The adapter of all kTokens tokens from `first` on; null if they do not share one.
    __device__ __forceinline__ const AdapterHeader* shared(int first) const {
        const AdapterHeader* one = of(first);
        bool is_one = true;
#pragma unroll
        for (int t = 1; t < kTokens; ++t) is_one &= of(first + t) == one;
        return is_one ? one : nullptr;
    }
};

// kRanksAtOnce sums of each token, by one warp.
template <int TOKENS>
__device__ __forceinline__ void multiply_ranks(const Act* x, const Act* down, int inputs, float* ranks, int stride) {
    const int lane = threadIdx.x % 32;
    float sums[TOKENS][kRanksAtOnce] = {};
    for (int k = lane * 8; k < inputs; k += 32 * 8) {
        float values[TOKENS][8];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) load8(x + (long long)(t) * inputs + k, values[t]);
#pragma unroll
        for (int r = 0; r < kRanksAtOnce; ++r) {
            float weights[8];
            load8(down + (long long)(r) * inputs + k, weights);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t)
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[t][r] = fmaf(values[t][j], weights[j], sums[t][r]);
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int r = 0; r < kRanksAtOnce; ++r) {
            const float sum = reduce_lanes(sums[t][r], 32, Sum{});
            if (lane == 0) ranks[(long long)(t) * stride + r] = sum;
        }
}

// ranks [T, stride] = down x [T, inputs]. inputs: a multiple of 8. Blocks: x groups of kTokens tokens, y a share of the
// ranks each.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    multiply_down(const Act* __restrict__ x, const unsigned char* __restrict__ memory, const long long* __restrict__ places,
                  const int* __restrict__ adapters, float* __restrict__ ranks, int num_tokens, int inputs, int stride) {
    const int first = blockIdx.x * kTokens, begin = (blockIdx.y * kWarps + threadIdx.x / 32) * kRanksAtOnce;
    const int step = gridDim.y * kWarps * kRanksAtOnce;
    const Adapters found{memory, places, adapters, num_tokens};
    x += (long long)(first) * inputs;
    ranks += (long long)(first) * stride;
    if (const AdapterHeader* shared = found.shared(first)) {
        const Act* down = shared->numbers();
        for (int r = begin; r < shared->num_ranks; r += step)
            multiply_ranks<kTokens>(x, down + (long long)(r) * inputs, inputs, ranks + r, stride);
        return;
    }
#pragma unroll 1
    for (int t = 0; t < kTokens; ++t) {
        const AdapterHeader* own = found.of(first + t);
        if (own == nullptr) continue;
        const Act* down = own->numbers();
        for (int r = begin; r < own->num_ranks; r += step)
            multiply_ranks<1>(x + (long long)(t) * inputs, down + (long long)(r) * inputs, inputs,
                              ranks + (long long)(t) * stride + r, stride);
    }
}

// Adds to 8 outputs of each token, from column on.
template <int TOKENS, class Out>
__device__ __forceinline__ void add_outputs(const AdapterHeader& adapter, const float* ranks, int stride, Out* out,
                                            int outputs, int column) {
    for (int p = 0; p < adapter.num_parts; ++p) {
        const AdapterPart part = adapter.parts[p];
        if (column < part.first_output || column >= part.first_output + part.num_outputs) continue;
        const int width = (part.num_outputs + 7) / 8 * 8;
        const Act* up = adapter.numbers() + part.up + (column - part.first_output);
        float sums[TOKENS][8] = {};
        for (int r = 0; r < part.num_ranks; ++r) {
            float weights[8];
            load8(up + (long long)(r) * width, weights);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                const float factor = ranks[(long long)(t) * stride + part.first_rank + r];
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[t][j] = fmaf(factor, weights[j], sums[t][j]);
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            Out* place = out + (long long)(t) * outputs + column;
            if (outputs % 8 == 0) {
                float x[8];
                load8(place, x);
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] += sums[t][j];
                store8(place, x);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (column + j < outputs) place[j] = from_float<Out>(to_float(place[j]) + sums[t][j]);
            }
        }
    }
}

template <class Out>
__device__ __forceinline__ void add_rows(const float* ranks, const unsigned char* memory, const long long* places,
                                         const int* adapters, Out* out, int num_tokens, int outputs, int stride) {
    const int first = blockIdx.y * kTokens, column = (blockIdx.x * kThreads + threadIdx.x) * 8;
    if (column >= outputs) return;
    const Adapters found{memory, places, adapters, num_tokens};
    ranks += (long long)(first) * stride;
    out += (long long)(first) * outputs;
    if (const AdapterHeader* shared = found.shared(first)) {
        add_outputs<kTokens>(*shared, ranks, stride, out, outputs, column);
        return;
    }
#pragma unroll 1
    for (int t = 0; t < kTokens; ++t)
        if (const AdapterHeader* own = found.of(first + t))
            add_outputs<1>(*own, ranks + (long long)(t) * stride, stride, out + (long long)(t) * outputs, outputs,
                           column);
}

// out [T, outputs] += up ranks. Blocks: x chunks of outputs, 8 a thread; y groups of kTokens tokens.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    add_up(const float* __restrict__ ranks, const unsigned char* __restrict__ memory, const long long* __restrict__ places,
           const int* __restrict__ adapters, Act* __restrict__ out, int num_tokens, int outputs, int stride) {
    add_rows(ranks, memory, places, adapters, out, num_tokens, outputs, stride);
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    add_up_fp32(const float* __restrict__ ranks, const unsigned char* __restrict__ memory,
                const long long* __restrict__ places, const int* __restrict__ adapters, float* __restrict__ out,
                int num_tokens, int outputs, int stride) {
    add_rows(ranks, memory, places, adapters, out, num_tokens, outputs, stride);
}

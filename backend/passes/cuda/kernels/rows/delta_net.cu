// The gated delta rule (arXiv 2412.06464): a matrix for each sequence and value head, which each token multiplies by a
// decay and corrects in the direction of its key. convolve, then apply_rule, then gate_results.
//
// Tokens of a row follow one another in the same threads. So a row's bits depend neither on other rows nor on how its
// sequence is cut into steps.
//
// Macros: ACT, KEY_DIM. value_dim: a multiple of 16, at most kThreads, as KEY_DIM.

#include "rows/activations.cuh"
#include "common/reduce.cuh"
#include "common/values.cuh"
#include "step/step_rows.cuh"

constexpr int kThreads = 128;
constexpr int kLanes = 8;                       // lanes that share a column of a state
constexpr int kColumns = kThreads / kLanes;
constexpr int kQuads = KEY_DIM / (4 * kLanes);  // a lane's numbers of a column, four at a time

// The heads of a layer. rows [tokens][q | k | v | gates of results]; channels are all but the gates.
struct Net {
    int key_heads, value_heads, value_dim, width;

    __device__ __forceinline__ int keys() const { return key_heads * KEY_DIM; }
    __device__ __forceinline__ int values() const { return value_heads * value_dim; }
    __device__ __forceinline__ int channels() const { return 2 * keys() + values(); }
    __device__ __forceinline__ int row_size() const { return channels() + values(); }
};

// A row of the step.
struct StepRow {
    int first, count, slot;  // its tokens; slot -1 is padding
    bool is_new;             // the sequence begins: its state is zeros, whatever the slot contains

    __device__ __forceinline__ StepRow(int row, const int* query_starts, const int* context_lens, const int* slots)
        : first(query_starts[row]), count(query_starts[row + 1] - first), slot(slots[row]),
          is_new(context_lens[row] == 0) {}
};

// The convolution's input of a channel, for the token at `place` of the row, or before it. kept: the slot's [width - 1][channels].
__device__ __forceinline__ float conv_input(const Net& net, const Act* rows, const float* kept, const StepRow& row,
                                            int place, int channel) {
    if (place >= 0) return to_float(rows[(long long)(row.first + place) * net.row_size() + channel]);
    return row.is_new ? 0.0f : kept[(place + net.width - 1) * net.channels() + channel];
}

__device__ __forceinline__ long long kept_at(const Net& net, const StepRow& row) {
    return (long long)(row.slot) * (net.width - 1) * net.channels();
}

// Convolves a token's channels, and divides each query and key by its length. conv [width][channels], the last of the
// token itself; inputs [slots][width - 1][channels]; mixed [tokens][channels]. Blocks: x tokens, y heads of q, k and v.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
    convolve(const Act* __restrict__ rows, const float* __restrict__ conv, const float* __restrict__ inputs,
             const int* __restrict__ query_starts, const int* __restrict__ context_lens, const int* __restrict__ slots,
             float* __restrict__ mixed, int num_rows, int key_heads, int value_heads, int value_dim, int width) {
    __shared__ float one_per_warp[kMaxWarps];
    const Net net{key_heads, value_heads, value_dim, width};
    const int token = blockIdx.x, head = blockIdx.y;
    const StepRow row(row_of_token(token, query_starts, num_rows), query_starts, context_lens, slots);
    if (row.slot < 0) return;
    const bool is_value = head >= 2 * key_heads;
    const bool exists = int(threadIdx.x) < (is_value ? value_dim : KEY_DIM);
    const int first = is_value ? 2 * net.keys() + (head - 2 * key_heads) * value_dim : head * KEY_DIM;
    const int channel = first + threadIdx.x;
    float y = 0.0f;
    if (exists) {
        for (int j = 0; j < width; ++j) {
            const int place = token - row.first + j + 1 - width;
            const float x = conv_input(net, rows, inputs + kept_at(net, row), row, place, channel);
            y = fmaf(conv[j * net.channels() + channel], x, y);
        }
        y = Silu{}(y);
    }
    if (!is_value) {
        y /= sqrtf(reduce_block(y * y, one_per_warp, Sum{}) + 1e-6f);
        if (head < key_heads) y /= sqrtf(float(KEY_DIM));
    }
    if (exists) mixed[(long long)(token) * net.channels() + channel] = y;
}

// Keeps the last inputs of the convolution; the row's blocks divide the channels. Each is read before it is overwritten.
__device__ __forceinline__ void keep_inputs(const Net& net, const Act* rows, float* kept, const StepRow& row) {
    const int block = blockIdx.z * gridDim.y + blockIdx.y, num_blocks = gridDim.y * gridDim.z;
    for (int channel = block * kThreads + threadIdx.x; channel < net.channels(); channel += num_blocks * kThreads)
        for (int j = 0; j < net.width - 1; ++j)
            kept[j * net.channels() + channel] =
                conv_input(net, rows, kept, row, row.count - (net.width - 1) + j, channel);
}

__device__ __forceinline__ void load_quads(const float* source, float (&x)[kQuads][4]) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
        const float4 quad = *reinterpret_cast<const float4*>(source + 4 * kLanes * i);
        x[i][0] = quad.x, x[i][1] = quad.y, x[i][2] = quad.z, x[i][3] = quad.w;
    }
}

// Applies the rule to the tokens of a row, for kColumns columns of a head's state. gates [tokens][strengths of heads |
// decays]; bias and decays [value_heads]; states [slots][value_heads][value_dim][KEY_DIM]; mixed: of convolve, whose
// values become results. tiles_key_heads: head i uses key head i modulo key_heads; otherwise neighbours share one.
// Blocks: x rows, y value heads, z columns.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    apply_rule(const Act* __restrict__ rows, const float* __restrict__ gates, const float* __restrict__ bias,
               const float* __restrict__ decays, float* __restrict__ states, float* __restrict__ inputs,
               const int* __restrict__ query_starts, const int* __restrict__ context_lens,
               const int* __restrict__ slots, float* mixed, int key_heads, int value_heads, int value_dim, int width,
               int tiles_key_heads) {
    const Net net{key_heads, value_heads, value_dim, width};
    const StepRow row(blockIdx.x, query_starts, context_lens, slots);
    if (row.slot < 0) return;
    keep_inputs(net, rows, inputs + kept_at(net, row), row);
    const int head = blockIdx.y, lane = threadIdx.x % kLanes, column = blockIdx.z * kColumns + threadIdx.x / kLanes;
    const int key_head = tiles_key_heads ? head % key_heads : head / (value_heads / key_heads);
    float* const place =
        states + (((long long)(row.slot) * value_heads + head) * value_dim + column) * KEY_DIM + 4 * lane;
    float state[kQuads][4] = {};
    if (!row.is_new) load_quads(place, state);
    for (int token = row.first; token < row.first + row.count; ++token) {
        float* const channels = mixed + (long long)(token) * net.channels();
        const float* const query = channels + key_head * KEY_DIM + 4 * lane;
        float* const value = channels + 2 * net.keys() + head * value_dim + column;
        const float* const gate = gates + (long long)(token) * 2 * value_heads + head;
        const float wanted = __shfl_sync(kWholeWarp, lane == 0 ? *value : 0.0f, 0, kLanes);  // that lane alone writes it
        float q[kQuads][4], k[kQuads][4];
        load_quads(query, q);
        load_quads(query + net.keys(), k);
        const float x = gate[value_heads] + bias[head];
        const float decay = expf(decays[head] * (x > 20.0f ? x : log1pf(expf(x))));
        const float strength = 1.0f / (1.0f + expf(-gate[0]));
        float known = 0.0f, read = 0.0f, agreement = 0.0f;
#pragma unroll
        for (int i = 0; i < kQuads; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                state[i][j] *= decay;
                known = fmaf(k[i][j], state[i][j], known);
                read = fmaf(q[i][j], state[i][j], read);
                agreement = fmaf(q[i][j], k[i][j], agreement);
            }
        known = reduce_lanes(known, kLanes, Sum{});
        read = reduce_lanes(read, kLanes, Sum{});
        agreement = reduce_lanes(agreement, kLanes, Sum{});
        const float update = (wanted - known) * strength;
#pragma unroll
        for (int i = 0; i < kQuads; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) state[i][j] = fmaf(k[i][j], update, state[i][j]);
        if (lane == 0) *value = fmaf(agreement, update, read);
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
        *reinterpret_cast<float4*>(place + 4 * kLanes * i) =
            make_float4(state[i][0], state[i][1], state[i][2], state[i][3]);
}

// Normalises each head's results and multiplies them by silu(gate). norm [value_dim]; out [tokens][values]. Blocks: x
// tokens, y value heads.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
    gate_results(const Act* __restrict__ rows, const float* __restrict__ mixed, const float* __restrict__ norm,
                 Act* __restrict__ out, int key_heads, int value_heads, int value_dim, int width, float eps) {
    __shared__ float one_per_warp[kMaxWarps];
    const Net net{key_heads, value_heads, value_dim, width};
    const long long token = blockIdx.x;
    const int at = blockIdx.y * value_dim + threadIdx.x;
    const bool exists = int(threadIdx.x) < value_dim;
    const float x = exists ? mixed[token * net.channels() + 2 * net.keys() + at] : 0.0f;
    const float scale = 1.0f / sqrtf(reduce_block(x * x, one_per_warp, Sum{}) / float(value_dim) + eps);
    if (!exists) return;
    const float gate = to_float(rows[token * net.row_size() + net.channels() + at]);
    out[token * net.values() + at] = from_float<Act>(x * scale * norm[threadIdx.x] * Silu{}(gate));
}

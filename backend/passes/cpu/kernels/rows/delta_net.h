// The gated delta rule (arXiv 2412.06464): a matrix for each sequence and value head, which each token multiplies by a
// decay and corrects in the direction of its key.
//
// Tokens of a row follow one another and a thread has a head of a row, so bits do not depend on the batch or on chunks.

#pragma once

#include "rows/streams.h"

namespace {

struct DeltaNet {  // mirrored by native_structs.py
    const float* conv;    // [width][channels]
    const float* bias;    // [value_heads], as decays
    const float* decays;  // negative
    const float* norm;    // [value_dim]
    float* states;        // [slots][value_heads][value_dim / 32][key_dim][32]; the last may have 16 columns
    float* inputs;        // [slots][width - 1][channels]: the convolution's last ones
    float* gates;         // [tokens][strengths of value_heads | decays], which become those of the formula
    float* mixed;         // [tokens][channels]: results of the convolution; those of heads replace values
    i64 first_spare;      // of states: that after the step's first token to verify, and then one for each
    i64 key_heads;
    i64 value_heads;
    i64 key_dim;    // a multiple of 16, as value_dim
    i64 value_dim;
    i64 width;
    i64 tiles_key_heads;  // head i uses key head i modulo key_heads; otherwise neighbours share one

    i64 values() const { return value_heads * value_dim; }
    i64 keys() const { return key_heads * key_dim; }
    i64 channels() const { return 2 * keys() + values(); }
    i64 row_size() const { return channels() + values(); }
    i64 key_head(i64 head) const { return tiles_key_heads ? head % key_heads : head / (value_heads / key_heads); }
};

// A row of the step.
struct DeltaRow {
    i64 first, count;  // its tokens
    i64 slot;
    bool is_new;  // its state is zeros, whatever the slot contains
    i64 first_verified, end_verified;  // its entries of Step::verified, which are the tokens before its last

    DeltaRow(const Step& step, i64 row)
        : first(step.row_starts[row]), count(step.row_starts[row + 1] - first), slot(step.slots[row]),
          is_new(step.contexts[row] == 0), first_verified(find(step, first)), end_verified(find(step, first + count)) {}

    static i64 find(const Step& step, i64 token) {
        return std::lower_bound(step.verified, step.verified + step.num_verified, token) - step.verified;
    }
    i64 num_after(i64 t) const { return first + count - 1 - t; }
    bool keeps_state_after(i64 t) const { return num_after(t) > 0 && num_after(t) <= end_verified - first_verified; }
    // Whose state is that after token t, if it is kept.
    i64 spare_after(const DeltaNet& net, i64 t) const { return net.first_spare + end_verified - num_after(t); }
};

// Inputs [channel, channel + 16) of the convolution, for the token at `place` of the row, or before it.
template <class T> Floats conv_input(const DeltaNet& net, const DeltaRow& row, const T* rows, i64 place, i64 channel) {
    if (place >= 0) return load(rows + (row.first + place) * net.row_size() + channel);
    if (row.is_new) return broadcast(0.0f);
    return load(net.inputs + ((row.slot + 1) * (net.width - 1) + place) * net.channels() + channel);
}

// Convolves channels [first, first + count) of a token, and divides a query or key by its length.
template <class T>
void convolve_head(const DeltaNet& net, const DeltaRow& row, const T* rows, i64 token, i64 first, i64 count) {
    float* out = net.mixed + token * net.channels() + first;
    Floats squares = broadcast(0.0f);
    for (i64 c = 0; c < count; c += 16) {
        Floats y = broadcast(0.0f);
        for (i64 j = 0; j < net.width; ++j) {
            const Floats x = conv_input(net, row, rows, token - row.first + j + 1 - net.width, first + c);
            y = fmadd(load(net.conv + j * net.channels() + first + c), x, y);
        }
        y = mul(y, sigmoid(y));
        squares = fmadd(y, y, squares);
        store(out + c, y);
    }
    if (first >= 2 * net.keys()) return;
    const float query_scale = first < net.keys() ? 1.0f / std::sqrt(float(net.key_dim)) : 1.0f;
    const Floats scale = broadcast(query_scale / std::sqrt(sum(squares) + 1e-6f));
    for (i64 c = 0; c < count; c += 16) store(out + c, mul(load(out + c), scale));
}

template <class T> void convolve(Engine& engine, const DeltaNet& net, const T* rows) {
    const std::int32_t* starts = engine.step.row_starts;
    const i64 heads = 2 * net.key_heads + net.value_heads;
    engine.split(engine.step.num_tokens * heads, 32, [&](i64 begin, i64 end, int) {
        for (i64 i = begin; i < end; ++i) {
            const i64 token = i / heads, head = i % heads, value = head - 2 * net.key_heads;
            const DeltaRow row(engine.step, std::upper_bound(starts, starts + engine.step.num_rows, token) - starts - 1);
            if (value < 0) convolve_head(net, row, rows, token, head * net.key_dim, net.key_dim);
            else convolve_head(net, row, rows, token, 2 * net.keys() + value * net.value_dim, net.value_dim);
        }
    });
}

// Keeps the inputs up to token t of a head's share of all channels, as those of a state.
template <class T> void keep_inputs(const DeltaNet& net, const DeltaRow& row, const T* rows, i64 head, i64 t, i64 state) {
    const i64 vectors = net.channels() / 16, kept = net.width - 1, end = t - row.first + 1;
    float* inputs = net.inputs + state * kept * net.channels();
    for (i64 j = 0; j < kept; ++j)  // each is read before it is overwritten
        for (i64 c = vectors * head / net.value_heads; c < vectors * (head + 1) / net.value_heads; ++c)
            store(inputs + j * net.channels() + c * 16, conv_input(net, row, rows, end - kept + j, c * 16));
}

template <class T> void keep_all_inputs(const DeltaNet& net, const DeltaRow& row, const T* rows, i64 head) {
    const i64 last = row.first + row.count - 1;
    for (i64 t = last - (row.end_verified - row.first_verified); t < last; ++t)
        keep_inputs(net, row, rows, head, t, row.spare_after(net, t));
    keep_inputs(net, row, rows, head, last, row.slot);
}

inline void compute_gates(const DeltaNet& net, const DeltaRow& row, i64 head) {
    for (i64 t = row.first; t < row.first + row.count; ++t) {
        float* gates = net.gates + t * 2 * net.value_heads + head;
        float& decay = gates[net.value_heads];
        const float x = decay + net.bias[head];
        decay = std::exp(net.decays[head] * (x > 20.0f ? x : std::log1p(std::exp(x))));
        gates[0] = 1.0f / (1.0f + std::exp(-gates[0]));
    }
}

// Runs the rule over all tokens of a row, for columns [column, column + 16 V) of a head's state. One pass over the state
// adds the update of the token before, applies the decay, and multiplies by key and query.
template <int V> void run_columns(const DeltaNet& net, const DeltaRow& row, i64 head, i64 column) {
    const auto columns_of = [&](i64 state) {
        return net.states + (state * net.value_heads + head) * net.key_dim * net.value_dim + column * net.key_dim;
    };
    float* state = columns_of(row.slot);
    constexpr i64 width = 16 * V;
    const i64 key_head = net.key_head(head);
    if (row.is_new) std::fill_n(state, net.key_dim * width, 0.0f);
    const float* before = nullptr;
    Floats update[V];
    for (int v = 0; v < V; ++v) update[v] = broadcast(0.0f);
    const auto add_update = [&](float* target) {
        for (i64 i = 0; i < net.key_dim; ++i)
            for (int v = 0; v < V; ++v) {
                const i64 place = i * width + 16 * v;
                store(target + place, fmadd(broadcast(before[i]), update[v], load(state + place)));
            }
    };
    for (i64 t = row.first; t < row.first + row.count; ++t) {
        float* mixed = net.mixed + t * net.channels();
        const float* query = mixed + key_head * net.key_dim;
        const float* key = query + net.keys();
        float* values = mixed + 2 * net.keys() + head * net.value_dim + column;
        const float* gates = net.gates + t * 2 * net.value_heads + head;
        const Floats decay = broadcast(gates[net.value_heads]), strength = broadcast(gates[0]);
        if (!before) before = key;
        Floats known[V], read[V];
        for (int v = 0; v < V; ++v) known[v] = read[v] = broadcast(0.0f);
        for (i64 i = 0; i < net.key_dim; ++i) {
            const Floats last = broadcast(before[i]), k = broadcast(key[i]), q = broadcast(query[i]);
            for (int v = 0; v < V; ++v) {
                float* place = state + i * width + 16 * v;
                const Floats x = mul(fmadd(last, update[v], load(place)), decay);
                known[v] = fmadd(k, x, known[v]);
                read[v] = fmadd(q, x, read[v]);
                store(place, x);
            }
        }
        const Floats agreement = broadcast(dot(query, key, net.key_dim));
        for (int v = 0; v < V; ++v) {
            update[v] = mul(sub(load(values + 16 * v), known[v]), strength);
            store(values + 16 * v, fmadd(agreement, update[v], read[v]));
        }
        before = key;
        if (row.keeps_state_after(t)) add_update(columns_of(row.spare_after(net, t)));
    }
    add_update(state);
}

// Normalises a head's results and multiplies them by their gates.
template <class T>
void write_results(const Engine& engine, const DeltaNet& net, const DeltaRow& row, const T* rows, i64 head, T* out) {
    for (i64 t = row.first; t < row.first + row.count; ++t) {
        const float* x = net.mixed + t * net.channels() + 2 * net.keys() + head * net.value_dim;
        const T* gate = rows + t * net.row_size() + net.channels() + head * net.value_dim;
        T* target = out + t * net.values() + head * net.value_dim;
        const Floats scale = broadcast(inverse_rms(x, net.value_dim, engine.shape.eps));
        for (i64 k = 0; k < net.value_dim; k += 16)
            store(target + k, silu_mul(load(gate + k), mul(mul(load(x + k), scale), load(net.norm + k))));
    }
}

// rows: [tokens][q | k | v | gates of results], before the convolution.
template <class T> void run_delta_net(Engine& engine, const DeltaNet& net, const T* rows, T* out) {
    convolve(engine, net, rows);
    engine.pool.run(engine.step.num_rows * net.value_heads, [&](i64 chunk, int) {
        const DeltaRow row(engine.step, chunk / net.value_heads);
        const i64 head = chunk % net.value_heads;
        keep_all_inputs(net, row, rows, head);
        compute_gates(net, row, head);
        i64 column = 0;
        for (; column + 32 <= net.value_dim; column += 32) run_columns<2>(net, row, head, column);
        if (column < net.value_dim) run_columns<1>(net, row, head, column);
        write_results(engine, net, row, rows, head, out);
    });
}

}  // namespace

// Mixtures of experts: which experts a row uses, and the products of all rows with theirs.
//
// Rows are grouped by expert, so each weight is read once for all its rows. A row's results are added in the order of its
// experts' numbers, whatever the other rows use: its bits are the same in any batch.

#pragma once

#include "rows/row_ops.h"

namespace {

// Probabilities of all experts without their common factor, e^(logit - largest), and their sum, into powers[count].
inline float softmax_powers(const float* logits, i64 count, float* powers) {
    const float largest = *std::max_element(logits, logits + count);
    Floats total = broadcast(0.0f);
    for (i64 k = 0; k < count; k += 16) {
        const Floats x = sub(load(logits + k, count - k), broadcast(largest));
        const Floats power = exp2_negative(mul(x, broadcast(kLog2E)));
        store(powers + k, power, count - k);
        total = add(total, select(lanes_between(0, count - k), power, broadcast(0.0f)));
    }
    return sum(total);
}

// The n largest of logits[count], largest first, and of equal ones the first. Any n different ones if some are NaN.
inline void choose_largest(const float* logits, i64 count, i64 n, std::int32_t* chosen) {
    i64 found = 0;
    for (i64 expert = 0; expert < count; ++expert) {
        if (found == n && !(logits[expert] > logits[chosen[n - 1]])) continue;
        i64 place = found < n ? found++ : n - 1;
        for (; place > 0 && logits[expert] > logits[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
        chosen[place] = std::int32_t(expert);
    }
}

// Fills routing.chosen and chosen_weights. logits [rows][count] become powers.
inline void choose_experts(Engine& engine, const Experts& experts, float* logits) {
    Routing& routing = engine.routing;
    const i64 n = experts.per_token;
    engine.split(engine.step.rows(), 16, [&](i64 first, i64 last, int) {
        for (i64 r = first; r < last; ++r) {
            float* row = logits + r * experts.count;
            float* weights = routing.chosen_weights.data() + r * n;
            std::int32_t* chosen = routing.chosen.data() + r * n;
            choose_largest(row, experts.count, n, chosen);
            const float all = softmax_powers(row, experts.count, row);
            float total = 0.0f;
            for (i64 i = 0; i < n; ++i) total += weights[i] = row[chosen[i]];
            for (i64 i = 0; i < n; ++i) {
                weights[i] /= experts.normalises ? total : all;
                if (experts.factors) weights[i] *= experts.factors[chosen[i]];
            }
        }
    });
}

// Groups the pairs of row and expert by expert, in blocks of at most panel_rows.
inline void group_by_expert(Routing& routing, i64 rows, const Experts& experts, i64 panel_rows) {
    routing.ends.assign(experts.count, 0);
    for (const std::int32_t expert : routing.chosen) ++routing.ends[expert];
    routing.blocks.clear();
    i64 begin = 0;
    for (i64 expert = 0; expert < experts.count; ++expert) {
        const i64 end = begin + routing.ends[expert];
        routing.ends[expert] = begin;
        for (i64 first = begin; first < end; first += panel_rows)
            routing.blocks.push_back({expert, first, std::min(first + panel_rows, end)});
        begin = end;
    }
    for (i64 pair = 0; pair < rows * experts.per_token; ++pair) {
        const i64 place = routing.ends[routing.chosen[pair]]++;
        routing.rows[place] = std::int32_t(pair / experts.per_token);
        routing.weights[place] = routing.chosen_weights[pair];
    }
}

// Decides by the router's logits [rows][count], which are overwritten, and copies each pair's row of x [rows][hidden].
template <class T> void run_route(Engine& engine, const Experts& experts, const T* x, float* logits) {
    Routing& routing = engine.routing;
    const i64 rows = engine.step.rows(), pairs = rows * experts.per_token, hidden = experts.gate_up.inputs;
    routing.chosen.resize(pairs);
    routing.chosen_weights.resize(pairs);
    routing.rows.resize(pairs);
    routing.weights.resize(pairs);
    choose_experts(engine, experts, logits);
    group_by_expert(routing, rows, experts,
                    std::min(max_panel_rows<T>(engine, experts.gate_up), max_panel_rows<T>(engine, experts.down)));
    const auto reserve = [pairs](std::vector<CacheLine>& memory, i64 width) {
        const size_t lines = (pairs * width * sizeof(T) + sizeof(CacheLine) - 1) / sizeof(CacheLine);
        if (memory.size() < lines) memory.resize(lines);
    };
    reserve(routing.inputs, hidden);
    reserve(routing.gated, experts.gate_up.outputs);
    T* inputs = reinterpret_cast<T*>(routing.inputs.data());
    engine.split(pairs, 64, [&](i64 first, i64 last, int) {
        for (i64 pair = first; pair < last; ++pair)
            std::memcpy(inputs + pair * hidden, x + routing.rows[pair] * hidden, hidden * sizeof(T));
    });
}

inline Linear of_expert(Linear first, i64 bytes, i64 expert) {
    first.parts[0].packed = static_cast<const char*>(first.parts[0].packed) + expert * bytes;
    if (first.bias) first.bias += expert * first.outputs * (1 + first.gated);
    return first;
}

// output: kGatedSilu, kGatedGelu or kGatedClamped.
template <class T> void run_expert_inputs(Engine& engine, const Experts& experts, i64 output) {
    const Routing& routing = engine.routing;
    const i64 panels = num_panels(experts.gate_up);
    const T* inputs = reinterpret_cast<const T*>(routing.inputs.data());
    void* gated = engine.routing.gated.data();
    prepare_rows(engine, experts.gate_up, i64(routing.rows.size()), inputs);
    engine.pool.run_ranges(i64(routing.blocks.size()) * panels, [&](i64 chunk) {
        const Routing::Block& block = routing.blocks[chunk / panels];
        const Linear linear = of_expert(experts.gate_up, experts.gate_up_bytes, block.expert);
        const i64 panel = chunk % panels;
        const TileScope scope;
        alignas(64) float c[std::max(kPanelRows, kTilePanelRows) * kPanel];
        multiply_panel(engine, linear, panel, block.begin, block.end, inputs, c);
        write_outputs<T>(engine, linear, output, panel, block.end - block.begin, c, gated, block.begin);
    });
}

// residual[row] += weight × (c[pair] + bias), for the pairs of a block and the outputs of a panel.
inline void add_weighted(const Routing& routing, const Routing::Block& block, const Linear& linear, i64 panel,
                         const float* c, float* residual) {
    for (i64 pair = block.begin; pair < block.end; ++pair) {
        const Floats weight = broadcast(routing.weights[pair] * linear.scale);
        const float* from = c + (pair - block.begin) * kPanel;
        float* to = residual + routing.rows[pair] * linear.outputs;
        for (i64 column = panel * kPanel; column < std::min((panel + 1) * kPanel, linear.outputs); column += 16) {
            const i64 count = linear.outputs - column;
            Floats x = load(from + column - panel * kPanel);
            if (linear.bias) x = add(x, load(linear.bias + column, count));
            store(to + column, fmadd(x, weight, load(to + column, count)), count);
        }
    }
}

// A thread computes the same outputs of all experts, so it alone adds to them. replaces: residual is 0 before.
template <class T> void run_expert_outputs(Engine& engine, const Experts& experts, float* residual, bool replaces) {
    const Routing& routing = engine.routing;
    const T* gated = reinterpret_cast<const T*>(routing.gated.data());
    prepare_rows(engine, experts.down, i64(routing.rows.size()), gated);
    engine.pool.run_ranges(num_panels(experts.down), [&](i64 panel) {
        const TileScope scope;
        alignas(64) float c[std::max(kPanelRows, kTilePanelRows) * kPanel];
        const i64 outputs = experts.down.outputs, first = panel * kPanel;
        for (i64 row = 0; replaces && row < engine.step.rows(); ++row)
            std::fill_n(residual + row * outputs + first, std::min<i64>(kPanel, outputs - first), 0.0f);
        for (const Routing::Block& block : routing.blocks) {
            const Linear linear = of_expert(experts.down, experts.down_bytes, block.expert);
            multiply_panel(engine, linear, panel, block.begin, block.end, gated, c);
            add_weighted(routing, block, linear, panel, c, residual);
        }
    });
}

// Multiplies each row of mixed [rows][width] by the sigmoid of its number in gates [rows].
template <class T> void run_weight_rows(Engine& engine, const float* gates, i64 width, T* mixed) {
    for_each_row(engine, [&](i64 r) {
        const Floats weight = sigmoid(broadcast(gates[r]));
        T* row = mixed + r * width;
        for (i64 k = 0; k < width; k += 16) store(row + k, mul(load(row + k, width - k), weight), width - k);
    });
}

}  // namespace

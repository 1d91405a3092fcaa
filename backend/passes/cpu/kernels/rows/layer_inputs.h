// Inputs of layers: vectors that depend on the token and its embedding, one for each layer.

#pragma once

#include "rows/experts.h"

namespace {

// inputs [tokens][layers][width], projections of the embeddings, become (norm + row of the table) / √2.
template <class T> void run_layer_inputs(Engine& engine, const LayerInputs& layers, float* inputs) {
    const i64 width = layers.width, size = layers.num_layers * width;
    const Floats scale = broadcast(layers.scale), half = broadcast(std::sqrt(0.5f));
    engine.split(engine.step.num_tokens, 1, [&](i64 first, i64 last, int) {
        std::vector<float> unpacked(layers.is_packed ? size : 0);
        for (i64 t = first; t < last; ++t) {
            const i64 own = engine.step.input_ids[t], id = own < layers.num_ids ? own : 0;
            if (layers.is_packed) read_packed_row<T>(*static_cast<const Linear*>(layers.table), id, unpacked.data());
            const T* plain = static_cast<const T*>(layers.table) + id * size;
            for (i64 at = 0; at < size; at += width) {
                float* x = inputs + t * size + at;
                const RowScale row = row_scale(engine.shape, x, width);
                for (i64 k = 0; k < width; k += 16) {
                    const i64 count = width - k;
                    const Floats row_part = layers.is_packed ? load(unpacked.data() + at + k, count) : load(plain + at + k, count);
                    const Floats norm = normalise(x, k, width, row, layers.norm, nullptr);
                    store(x + k, mul(fmadd(row_part, scale, norm), half), count);
                }
            }
        }
    });
}

// Multiplies the rows of gates [rows][width] by their tokens' inputs of a layer.
template <class T>
void run_weight_by_input(Engine& engine, const LayerInputs& layers, const float* inputs, i64 layer, T* gates) {
    const i64 width = layers.width;
    for_each_row(engine, [&](i64 r) {
        const float* input = inputs + (engine.step.token(r) * layers.num_layers + layer) * width;
        T* row = gates + r * width;
        for (i64 k = 0; k < width; k += 16)
            store(row + k, mul(load(row + k, width - k), load(input + k, width - k)), width - k);
    });
}

}  // namespace

// Activations of single numbers.

#pragma once

// x / (1 + e^-x)
struct Silu {
    __device__ __forceinline__ float operator()(float x) const { return x / (1.0f + expf(-x)); }
};
// x / 2 * (1 + tanh u) with u = sqrt(2 / pi) * (x + 0.044715 x^3), and (1 + tanh u) / 2 = 1 / (1 + e^-2u).
struct GeluTanh {
    __device__ __forceinline__ float operator()(float x) const {
        return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
    }
};

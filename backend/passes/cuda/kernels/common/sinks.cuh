// Attention sinks: a score of each head that takes part in the softmax and has no value. -infinity for none.

#pragma once

#include "common/values.cuh"

// The sum of a complete row's weights, relative to 2^peak, with that of the sink. A sink far above all scores makes it
// infinite, and so the result 0. Without a sink no bit changes.
__device__ __forceinline__ float sum_with_sink(float peak, float sum, float sink) {
    return sum + ex2_approx(sink * kLog2E - peak);
}

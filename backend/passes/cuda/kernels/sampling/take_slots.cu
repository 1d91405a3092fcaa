// Sets the parameters, biases and token counts of slots that have a new owner, from one packed array of 32-bit words.
// step/device_sampler.py packs it.

#include "sampling/sampling.cuh"

struct SlotUpdate {
    SlotParams params;
    int slot;
    int first_bias;               // index in the array of the first (token, value) pair
    int first_count, num_counts;  // of the seen tokens: token << 13 | times generated << 1 | whether in the prompt
};

// One block per slot. updates: one SlotUpdate per slot, followed by the data that they refer to.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    take_slots(const int* __restrict__ updates, SlotParams* slot_params, unsigned short* counts, int* bias_tokens,
               float* bias_values, int vocab_size, int max_biases) {
    const SlotUpdate& update = reinterpret_cast<const SlotUpdate*>(updates)[blockIdx.x];
    const long long slot = update.slot;
    const int2* biases = reinterpret_cast<const int2*>(updates + update.first_bias);
    for (int i = threadIdx.x; i < update.params.num_biases; i += kThreads) {
        bias_tokens[slot * max_biases + i] = biases[i].x;
        bias_values[slot * max_biases + i] = __int_as_float(biases[i].y);
    }
    if (threadIdx.x == 0) slot_params[slot] = update.params;
    if (!update.params.is_penalised) return;
    const int width = (vocab_size + 7) / 8;  // 16 bytes each
    uint4* row = reinterpret_cast<uint4*>(counts) + slot * width;
    for (int i = threadIdx.x; i < width; i += kThreads) row[i] = make_uint4(0u, 0u, 0u, 0u);
    __syncthreads();
    const unsigned* seen = reinterpret_cast<const unsigned*>(updates + update.first_count);
    for (int i = threadIdx.x; i < update.num_counts; i += kThreads)
        counts[slot * width * 8 + (seen[i] >> 13)] = (unsigned short)(seen[i] & 0x1fffu);
}

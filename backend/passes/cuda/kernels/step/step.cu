// What a step does before its layers run.

constexpr int kThreads = 128;

// Update the page table, which persists between steps. changes [n, 3]: slot, index into the slot's pages, page; each pair of slot and index occurs once. Blocks: x changes.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
    change_pages(const int* __restrict__ changes, int* __restrict__ page_table, int n, int max_pages) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= n) return;
    page_table[(long long)(changes[3 * i]) * max_pages + changes[3 * i + 1]] = changes[3 * i + 2];
}

// out [tokens, rotary_dim]: [cos | sin] of each token's pairs, a pair at the position of its axis. rope [positions,
// rotary_dim]; positions [tokens, 3]; axes [rotary_dim / 2]. Blocks: x tokens.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
    turn_tokens(const float* __restrict__ rope, const int* __restrict__ positions, const int* __restrict__ axes,
                float* __restrict__ out, int rotary_dim) {
    const long long token = blockIdx.x;
    for (int i = threadIdx.x; i < rotary_dim; i += kThreads) {
        const long long position = positions[3 * token + axes[i % (rotary_dim / 2)]];
        out[token * rotary_dim + i] = rope[position * rotary_dim + i];
    }
}

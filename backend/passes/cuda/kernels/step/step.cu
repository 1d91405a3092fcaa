// Updates the page table, which persists between steps, with the changes that the host sends with a step.

constexpr int kThreads = 128;

// changes [n, 3]: slot, index into the slot's pages, page; each pair of slot and index occurs once. Blocks: x changes.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
    change_pages(const int* __restrict__ changes, int* __restrict__ page_table, int n, int max_pages) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= n) return;
    page_table[(long long)(changes[3 * i]) * max_pages + changes[3 * i + 1]] = changes[3 * i + 2];
}

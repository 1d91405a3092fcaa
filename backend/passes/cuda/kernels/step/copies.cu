// Copies of rows and pages of any contents. A thread copies 16 bytes at a time.

constexpr int kThreads = 256;

// out[i] = source[rows[i]], in units of 16 bytes; if rows[i] is negative, out[i] does not change. Blocks: x rows, y
// units.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    gather_rows(const uint4* __restrict__ source, const int* __restrict__ rows, uint4* __restrict__ out, int units,
                long long source_stride, long long out_stride) {
    const int row = rows[blockIdx.x], unit = blockIdx.y * kThreads + threadIdx.x;
    if (row < 0 || unit >= units) return;
    out[blockIdx.x * out_stride + unit] = source[row * source_stride + unit];
}

constexpr int kUnitsPerThread = 4;

// Copy pages of source to pages of destination, in all layers. pairs [n, 2]: (source page, destination page); a
// negative page is padding; no page is both. page_units: 16-byte units per page and layer. The strides are between
// layers, in units. Blocks: x pairs, y layers, z pieces of a page.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    copy_pages(const uint4* source, uint4* destination, const int* __restrict__ pairs, int page_units,
               long long source_stride, long long destination_stride) {
    const int from = pairs[2 * blockIdx.x], to = pairs[2 * blockIdx.x + 1];
    if (from < 0 || to < 0) return;
    source += blockIdx.y * source_stride + (long long)(from) * page_units;
    destination += blockIdx.y * destination_stride + (long long)(to) * page_units;
    const int first = blockIdx.z * kThreads * kUnitsPerThread + threadIdx.x;
    uint4 held[kUnitsPerThread];
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i)
        if (first + i * kThreads < page_units) held[i] = source[first + i * kThreads];
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i)
        if (first + i * kThreads < page_units) destination[first + i * kThreads] = held[i];
}

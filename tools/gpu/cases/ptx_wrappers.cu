// Kernels that call each wrapper of ptx.cuh once, for checks against references.

#include "common/ptx.cuh"

// a [16, 16] and b [16, 8] row by row, in 16-bit floats; out [16, 8] += a · b. One warp.
extern "C" __global__ void __launch_bounds__(32, 1)
    multiply(const unsigned short* a, const unsigned short* b, float* out) {
    const int lane = int(threadIdx.x), g = lane / 4, t = lane % 4;
    const auto pair = [](unsigned short low, unsigned short high) { return low | unsigned(high) << 16; };
    const auto a_pair = [&](int row, int column) { return pair(a[row * 16 + column], a[row * 16 + column + 1]); };
    const auto b_pair = [&](int row, int column) { return pair(b[row * 8 + column], b[(row + 1) * 8 + column]); };
    const unsigned as[4] = {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8), a_pair(g + 8, 2 * t + 8)};
    float* places[4] = {out + g * 8 + 2 * t, out + g * 8 + 2 * t + 1, out + (g + 8) * 8 + 2 * t,
                        out + (g + 8) * 8 + 2 * t + 1};
    float acc[4];
    for (int i = 0; i < 4; ++i) acc[i] = *places[i];
#if HALF
    mma_m16n8k16_f16(acc, as, b_pair(2 * t, g), b_pair(2 * t + 8, g));
#else
    mma_m16n8k16_bf16(acc, as, b_pair(2 * t, g), b_pair(2 * t + 8, g));
#endif
    for (int i = 0; i < 4; ++i) *places[i] = acc[i];
}

// matrices [4, 8, 8]; out [2 forms, 4 registers, 32 lanes, 2]: x4, x4 transposed. One warp.
extern "C" __global__ void __launch_bounds__(32, 1) load(const unsigned short* matrices, unsigned* out) {
    __shared__ __align__(16) unsigned short rows[4 * 8 * 8];
    for (int i = int(threadIdx.x); i < 4 * 8 * 8; i += 32) rows[i] = matrices[i];
    __syncthreads();
    unsigned four[4];
    const auto keep = [&](int form) {
        for (int i = 0; i < 4; ++i) out[(form * 4 + i) * 32 + int(threadIdx.x)] = four[i];
    };
    ldmatrix_x4(four, rows + threadIdx.x * 8);
    keep(0);
    ldmatrix_x4_trans(four, rows + threadIdx.x * 8);
    keep(1);
}

// 5 threads copy 4 bytes each, as `copy` does with 16. Zeros follow the bytes that are read.
extern "C" __global__ void __launch_bounds__(5, 1) copy_words(const unsigned char* source, unsigned char* out) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const int mine = 4 * int(threadIdx.x);
    cp_async_4(bytes + mine, source + mine, int(threadIdx.x));
    cp_async_commit();
    cp_async_wait<0>();
    for (int i = 0; i < 4; ++i) out[mine + i] = bytes[mine + i];
}

// 16 threads copy 16 bytes each. Zeros follow the bytes that are read.
extern "C" __global__ void __launch_bounds__(16, 1) copy(const unsigned char* source, unsigned char* out) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const int mine = 16 * int(threadIdx.x);
    cp_async_16(bytes + mine, source + mine, int(threadIdx.x));
    cp_async_commit();
    cp_async_wait<0>();
    for (int i = 0; i < 16; ++i) out[mine + i] = bytes[mine + i];
}

extern "C" __global__ void narrow(const float* in, unsigned short* bf16, unsigned short* f16, unsigned char* e4m3,
                                  int count) {
    for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < count; i += int(gridDim.x * blockDim.x)) {
        bf16[i] = float_to_bf16(in[i]);
        f16[i] = float_to_f16(in[i]);
        e4m3[i] = float_to_e4m3(in[i]);
    }
}

// Pairs: in [count, 2]; each output has [count, 2] values.
extern "C" __global__ void narrow_pairs(const float* in, unsigned* bf16, unsigned* f16, unsigned short* e4m3,
                                        int count) {
    for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < count; i += int(gridDim.x * blockDim.x)) {
        bf16[i] = pack_bf16x2(in[2 * i], in[2 * i + 1]);
        f16[i] = pack_f16x2(in[2 * i], in[2 * i + 1]);
        e4m3[i] = pack_e4m3x2(in[2 * i], in[2 * i + 1]);
    }
}

// Widens all 65,536 16-bit values: as fp16 to float, and as e4m3 pairs to fp16 pairs.
extern "C" __global__ void widen(float* f16, unsigned* e4m3_pairs) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < 65536; i += gridDim.x * blockDim.x) {
        const unsigned short bits = static_cast<unsigned short>(i);
        f16[i] = f16_to_float(bits);
        e4m3_pairs[i] = e4m3x2_to_f16x2(bits);
    }
}

// Sums and products of 64 fp16 pairs, then of the same bits as bf16 pairs; out [4, 64].
extern "C" __global__ void reckon(const unsigned* a, const unsigned* b, unsigned* out) {
    out[threadIdx.x] = add_f16x2(a[threadIdx.x], b[threadIdx.x]);
    out[64 + threadIdx.x] = mul_f16x2(a[threadIdx.x], b[threadIdx.x]);
    out[128 + threadIdx.x] = add_bf16x2(a[threadIdx.x], b[threadIdx.x]);
    out[192 + threadIdx.x] = mul_bf16x2(a[threadIdx.x], b[threadIdx.x]);
}

extern "C" __global__ void permute(const unsigned* a, const unsigned* b, const unsigned* selector, unsigned* out) {
    out[threadIdx.x] = prmt(a[threadIdx.x], b[threadIdx.x], selector[threadIdx.x]);
}

// out [64]
extern "C" __global__ void choose_larger(const float* a, const float* b, float* out) {
    out[threadIdx.x] = max_or_nan(a[threadIdx.x], b[threadIdx.x]);
}

// out [3, 64]
extern "C" __global__ void approximate(const float* in, float* out) {
    out[threadIdx.x] = ex2_approx(in[threadIdx.x]);
    out[64 + threadIdx.x] = lg2_approx(in[threadIdx.x]);
    out[128 + threadIdx.x] = rcp_approx(in[threadIdx.x]);
}

// The decoder's operations for one x86-64 machine with AVX-512: matrix products on packed weights, paged attention,
// norms, rotary embedding. Plain C functions at the end of the file, called through ctypes by ops_native.py.
//
// One micro-kernel, `tile_product`, does all multiplying. Each of its outputs is a chain of its own over k in one fixed
// order, and softmax runs over key blocks at fixed positions, so a token's result is the same bits whatever shares
// the batch, however the prompt was cut and wherever its pages lie.
//
// Layouts (lane = 2 elements of bf16 or 1 of fp32, the pair that one 32-bit lane of a product takes):
//   packed weight  [panel of 64 outputs][in / lane][64][lane], outputs padded with zeros to whole panels
//   cache          [page][kv head][keys | values]
//     keys         [head_dim / lane][page_size][lane]
//     values       [page_size / lane][head_dim][lane]
// so that decoding, which goes through a page head by head, reads it from one end to the other: memory gives streams of
// 32 KB twice the bytes that it gives pieces of 4 KB. Pages whose size is no multiple of 16 hold keys and values as
// [page_size][head_dim].

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "these kernels need AVX-512 (F, BW, VL)"
#endif

namespace {

using i64 = std::int64_t;
using bf16 = std::uint16_t;

constexpr int kMaxRows = 6;           // of a micro-kernel: 6 × 4 accumulators, 4 weights and a broadcast fill 32 registers
constexpr int kPanel = 64;            // outputs of a packed panel: 4 vectors
constexpr int kPanelRows = 96;        // rows of a product that go through a panel together
constexpr int kPanelSteps = 1024;     // steps of a panel that stay in the second-level cache meanwhile
constexpr int kMaxTileRows = 24;      // queries × heads of a group that share one read of keys and values
constexpr int kBlock = 64;            // key positions per softmax block, whatever the pages' size

template <class T> constexpr int kLane = std::is_same_v<T, float> ? 1 : 2;

// ---------------------------------------------------------------------------------------------- numbers and vectors

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    std::uint32_t bits = std::uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline __m256i round_to_bf16(__m512 x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)), 16));
#endif
}

inline __mmask16 tail_mask(i64 count) { return count >= 16 ? 0xffff : __mmask16((1u << count) - 1); }

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
inline void store(bf16* p, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_to_bf16(x)); }

// Masked accesses cost some CPUs far more than whole ones, even where the mask is all ones.
inline __m512 load(const float* p, __mmask16 m) { return m == 0xffff ? load(p) : _mm512_maskz_loadu_ps(m, p); }
inline __m512 load(const bf16* p, __mmask16 m) { return m == 0xffff ? load(p) : widen(_mm256_maskz_loadu_epi16(m, p)); }
inline void store(float* p, __m512 x, __mmask16 m) {
    if (m == 0xffff) store(p, x);
    else _mm512_mask_storeu_ps(p, m, x);
}
inline void store(bf16* p, __m512 x, __mmask16 m) {
    if (m == 0xffff) store(p, x);
    else _mm256_mask_storeu_epi16(p, m, round_to_bf16(x));
}

// 2^x for x <= 0; 0 below the smallest normal number, NaN for NaN. Relative error below 2e-7.
inline __m512 exp2_negative(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.339887440266574e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.618437357674640e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.550332471162809e-2f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.402264791363012e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.931472028550421e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), y, whole);
}

constexpr float kLog2E = 1.44269504088896340736f;

// gate × sigmoid(gate) × up; the exponent's argument is kept in range, where the quotient is already 0 or gate.
inline __m512 silu_mul(__m512 gate, __m512 up) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 size = _mm512_abs_ps(gate);
    const __m512 e = exp2_negative(_mm512_mul_ps(size, _mm512_set1_ps(-kLog2E)));
    // sigmoid(|g|) = 1 / (1 + e), sigmoid(-|g|) = e / (1 + e): no overflow either way.
    const __mmask16 negative = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 sigmoid = _mm512_div_ps(_mm512_mask_mov_ps(one, negative, e), _mm512_add_ps(one, e));
    return _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid), up);
}

// ------------------------------------------------------------------------------------------------------- micro-kernel

inline __m512 multiply_add(__m512 acc, const float* a, __m512 b) { return _mm512_fmadd_ps(_mm512_set1_ps(*a), b, acc); }
inline __m512 multiply_add(__m512 acc, const bf16* a, __m512 b) {
    std::int32_t pair;
    std::memcpy(&pair, a, 4);
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_castps_si512(b));
#else
    const __m512i high = _mm512_set1_epi32(std::int32_t(0xffff0000));
    const __m512i bits = _mm512_castps_si512(b);
    const __m512 a0 = _mm512_set1_ps(to_float(bf16(pair)));
    const __m512 a1 = _mm512_set1_ps(to_float(bf16(std::uint32_t(pair) >> 16)));
    acc = _mm512_fmadd_ps(a0, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), acc);
    return _mm512_fmadd_ps(a1, _mm512_castsi512_ps(_mm512_and_si512(bits, high)), acc);
#endif
}

// c[R][16 V] (+)= a[R][steps × lane] × b[steps][16 V × lane]; lda and ldb in elements, ldc in floats.
template <class T, int R, int V>
void tile_product_of(const T* a, i64 lda, const T* b, i64 ldb, i64 steps, float* c, i64 ldc, bool add) {
    __m512 acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] = add ? _mm512_loadu_ps(c + r * ldc + 16 * v) : _mm512_setzero_ps();
    for (i64 k = 0; k < steps; ++k) {
        __m512 w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) w[v] = _mm512_loadu_ps(reinterpret_cast<const float*>(b + k * ldb) + 16 * v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(acc[r][v], a + r * lda + k * kLane<T>, w[v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + r * ldc + 16 * v, acc[r][v]);
}

template <class T, int V>
void tile_product_rows(i64 rows, const T* a, i64 lda, const T* b, i64 ldb, i64 steps, float* c, i64 ldc, bool add) {
    switch (rows) {
        case 1: return tile_product_of<T, 1, V>(a, lda, b, ldb, steps, c, ldc, add);
        case 2: return tile_product_of<T, 2, V>(a, lda, b, ldb, steps, c, ldc, add);
        case 3: return tile_product_of<T, 3, V>(a, lda, b, ldb, steps, c, ldc, add);
        case 4: return tile_product_of<T, 4, V>(a, lda, b, ldb, steps, c, ldc, add);
        case 5: return tile_product_of<T, 5, V>(a, lda, b, ldb, steps, c, ldc, add);
        default: return tile_product_of<T, 6, V>(a, lda, b, ldb, steps, c, ldc, add);
    }
}

// Any number of rows and any multiple of 16 columns.
template <class T>
void product(i64 rows, i64 columns, const T* a, i64 lda, const T* b, i64 ldb, i64 steps, float* c, i64 ldc, bool add) {
    const i64 tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (i64 tile = 0, row = 0; tile < tiles; ++tile) {
        const i64 count = (rows - row + tiles - tile - 1) / (tiles - tile);
        const T* a_row = a + row * lda;
        float* c_row = c + row * ldc;
        i64 column = 0;
        for (; column + 64 <= columns; column += 64)
            tile_product_rows<T, 4>(count, a_row, lda, b + column * kLane<T>, ldb, steps, c_row + column, ldc, add);
        if (column + 32 <= columns) {
            tile_product_rows<T, 2>(count, a_row, lda, b + column * kLane<T>, ldb, steps, c_row + column, ldc, add);
            column += 32;
        }
        if (column < columns)
            tile_product_rows<T, 1>(count, a_row, lda, b + column * kLane<T>, ldb, steps, c_row + column, ldc, add);
        row += count;
    }
}

// --------------------------------------------------------------------------------------------------------- the threads

// Workers beside the calling thread. Chunks are claimed one by one, so a worker that the system has taken off its core
// holds up one chunk and not a fixed share; a worker spins for spin_ns after its last job and then sleeps in the kernel.
class Pool {
  public:
    Pool(int num_threads, i64 spin_ns) : num_threads_(num_threads), spin_ns_(spin_ns) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the process's own threads
        for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~Pool() {
        stop_.store(true);
        publish(0);
        for (auto& worker : workers_) worker.join();
    }

    int num_threads() const { return num_threads_; }

    // body(chunk, thread) for every chunk in [0, num_chunks), the highest first. Returns when all are done.
    template <class F> void run(i64 num_chunks, const F& body) {
        if (num_chunks <= 1 || num_threads_ == 1) {
            for (i64 chunk = num_chunks - 1; chunk >= 0; --chunk) body(chunk, 0);
            return;
        }
        call_.store([](const void* context, i64 chunk, int thread) { (*static_cast<const F*>(context))(chunk, thread); },
                    std::memory_order_relaxed);
        context_.store(&body, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        const std::uint32_t epoch = publish(std::uint32_t(num_chunks));
        claim(epoch, 0);
        for (int spins = 0; done_.load(std::memory_order_acquire) < num_chunks; ++spins) {
            if (spins < 4000) _mm_pause();
            else sched_yield();
        }
    }

  private:
    using Call = void (*)(const void*, i64, int);

    // A ticket is epoch << 32 | unclaimed chunks. Whoever takes a chunk of epoch e knows that job e is not over, and
    // so that call_ and context_, read since e was seen, are job e's.
    std::uint32_t publish(std::uint32_t num_chunks) {
        const std::uint32_t epoch = std::uint32_t(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(std::uint64_t(epoch) << 32 | num_chunks, std::memory_order_seq_cst);
        signal_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0)
            syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&signal_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
        return epoch;
    }

    void claim(std::uint32_t epoch, int thread) {
        const Call call = call_.load(std::memory_order_relaxed);
        const void* context = context_.load(std::memory_order_relaxed);
        i64 finished = 0;
        std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (std::uint32_t(ticket >> 32) == epoch && std::uint32_t(ticket) > 0) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            call(context, i64(std::uint32_t(ticket)) - 1, thread);
            ++finished;
            ticket = ticket_.load(std::memory_order_acquire);
        }
        if (finished) done_.fetch_add(finished, std::memory_order_release);
    }

    void work(int thread) {
        std::uint32_t seen = 0;
        while (!stop_.load(std::memory_order_acquire)) {
            const std::uint32_t epoch = await_job(seen);
            claim(epoch, thread);
            seen = epoch;
        }
    }

    std::uint32_t current_epoch() const { return std::uint32_t(ticket_.load(std::memory_order_seq_cst) >> 32); }

    std::uint32_t await_job(std::uint32_t seen) {
        const i64 deadline = now_ns() + spin_ns_;
        while (now_ns() < deadline)
            for (int i = 0; i < 32; ++i) {
                if (const std::uint32_t epoch = current_epoch(); epoch != seen) return epoch;
                _mm_pause();
            }
        for (;;) {
            const std::uint32_t signal = signal_.load(std::memory_order_seq_cst);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            if (current_epoch() == seen)
                syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&signal_), FUTEX_WAIT_PRIVATE, signal, nullptr, nullptr, 0);
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
            if (const std::uint32_t epoch = current_epoch(); epoch != seen) return epoch;
        }
    }

    static i64 now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return i64(now.tv_sec) * 1000000000 + now.tv_nsec;
    }

    const int num_threads_;
    const i64 spin_ns_;
    alignas(64) std::atomic<std::uint64_t> ticket_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> context_{nullptr};
    alignas(64) std::atomic<i64> done_{0};
    alignas(64) std::atomic<std::uint32_t> signal_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

// ---------------------------------------------------------------------------------------------------------- the state

struct Linear {  // mirrored by ops_native.py
    const void* packed;
    const float* bias;  // [outputs], or null; of a gated pair [gate | up]
    i64 inputs;
    i64 outputs;  // of a gated pair: of one of the two
};

struct Attention {  // mirrored by ops_native.py
    void* cache;
    const float* q_norm;  // [head_dim] or null, and so k_norm
    const float* k_norm;
    i64 window;  // tokens, or 0
    i64 uses_rope;
};

struct Shape {  // mirrored by ops_native.py
    i64 hidden;
    i64 num_heads;
    i64 num_kv_heads;
    i64 head_dim;
    i64 rotary_dim;
    i64 page_size;
    i64 act_bf16;
    i64 cache_bf16;
    float eps;
};

// Query tokens of one row that share a pass over its keys: tokens [token, token + count) of the step, at positions
// [position, position + count), written to rows from `out` of the output.
struct Tile {
    i64 row, token, count, position, out;
};

// What one thread takes on at a time: a tile for kv heads [head, last_head).
struct Item {
    Tile tile;
    i64 head, last_head;
};

struct Step {
    std::vector<std::int32_t> positions;
    std::vector<i64> slots;  // page × page_size + place, for each token
    std::vector<Item> items, last_items;
    std::vector<i64> last_tokens;
    const std::int32_t* page_table = nullptr;
    i64 page_table_width = 0;
    i64 num_tokens = 0;
};

struct Engine {
    Pool pool;
    Shape shape;
    Step step;
    std::vector<std::vector<float>> scratch;  // of each thread

    Engine(int num_threads, i64 spin_ns, const Shape& s) : pool(num_threads, spin_ns), shape(s), scratch(num_threads) {
        const i64 floats = std::max(tile_rows(), s.num_heads) * (2 * s.head_dim + 2 * kBlock + 2) + 2 * kBlock * s.head_dim;
        for (auto& buffer : scratch) buffer.resize(floats);
    }

    i64 group() const { return shape.num_heads / shape.num_kv_heads; }
    i64 tile_rows() const { return std::max<i64>(kMaxTileRows, group()); }

    // Elements between a kv head's keys and its values, and half of those between heads.
    i64 half() const { return shape.page_size * shape.head_dim; }

    bool in_place() const { return shape.page_size % 16 == 0; }

    // Positions that lie together: the largest part of a block that no page's end cuts.
    i64 segment() const {
        if (!in_place()) return kBlock;
        return shape.page_size % 64 == 0 ? 64 : shape.page_size % 32 == 0 ? 32 : 16;
    }

    // Runs body(first, last, thread) over [0, count) in pieces of about grain, or at once where there is one piece.
    template <class F> void split(i64 count, i64 grain, const F& body) {
        const i64 pieces = std::clamp<i64>(count / std::max<i64>(grain, 1), 1, i64(pool.num_threads()) * 4);
        pool.run(pieces, [&](i64 piece, int thread) { body(count * piece / pieces, count * (piece + 1) / pieces, thread); });
    }
};

// ------------------------------------------------------------------------------------------------------------ products

enum Output : i64 { kStore = 0, kStoreFloat = 1, kAdd = 2, kGated = 3 };

template <class T>
void write_outputs(const Linear& linear, i64 output, i64 panel, i64 rows, const float* c, void* out, i64 first_row) {
    const i64 width = output == kGated ? kPanel / 2 : kPanel;
    const i64 first = panel * width;
    for (i64 r = 0; r < rows; ++r) {
        const float* row = c + r * kPanel;
        const i64 base = (first_row + r) * linear.outputs;
        for (i64 v = 0; v < width && first + v < linear.outputs; v += 16) {
            const i64 column = first + v;
            const __mmask16 mask = tail_mask(linear.outputs - column);
            __m512 x = load(row + v);
            if (linear.bias) x = _mm512_add_ps(x, load(linear.bias + column, mask));
            switch (output) {
                case kGated: {
                    __m512 up = load(row + width + v);
                    if (linear.bias) up = _mm512_add_ps(up, load(linear.bias + linear.outputs + column, mask));
                    store(static_cast<T*>(out) + base + column, silu_mul(x, up), mask);
                    break;
                }
                case kAdd: {
                    float* target = static_cast<float*>(out) + base + column;
                    store(target, _mm512_add_ps(load(target, mask), x), mask);
                    break;
                }
                case kStoreFloat: store(static_cast<float*>(out) + base + column, x, mask); break;
                default: store(static_cast<T*>(out) + base + column, x, mask);
            }
        }
    }
}

template <class T> void run_linear(Engine& engine, const Linear& linear, i64 output, const T* x, i64 rows, void* out) {
    const i64 width = output == kGated ? kPanel / 2 : kPanel;
    const i64 panels = (linear.outputs + width - 1) / width;
    const i64 steps = linear.inputs / kLane<T>;
    const i64 enough = (engine.pool.num_threads() * 4 + panels - 1) / panels;  // row blocks to keep every thread busy
    const i64 row_blocks =
        std::max((rows + kPanelRows - 1) / kPanelRows, std::clamp<i64>(enough, 1, (rows + 47) / 48));
    const T* packed = static_cast<const T*>(linear.packed);
    engine.pool.run(panels * row_blocks, [&](i64 chunk, int) {
        // Panels in rising order, chunks come in falling order. No prefetch: the memory's own is faster than any of ours.
        const i64 panel = panels - 1 - chunk / row_blocks, row_block = chunk % row_blocks;
        const i64 begin = rows * row_block / row_blocks, end = rows * (row_block + 1) / row_blocks;
        const T* weights = packed + panel * linear.inputs * kPanel;
        alignas(64) float c[kPanelRows * kPanel];
        for (i64 step = 0; step < steps; step += kPanelSteps)
            product(end - begin, kPanel, x + begin * linear.inputs + step * kLane<T>, linear.inputs,
                    weights + step * kPanel * kLane<T>, kPanel * kLane<T>, std::min<i64>(kPanelSteps, steps - step), c,
                    kPanel, step > 0);
        write_outputs<T>(linear, output, panel, end - begin, c, out, begin);
    });
}

template <class T> void pack_weight(Engine& engine, const T* weight, i64 inputs, i64 outputs, bool gated, T* packed) {
    const i64 width = gated ? kPanel / 2 : kPanel;
    const i64 panels = (outputs + width - 1) / width;
    engine.pool.run(panels, [&](i64 panel, int) {
        T* target = packed + panel * inputs * kPanel;
        for (i64 column = 0; column < kPanel; ++column) {
            const i64 output = panel * width + column % width;
            const T* source = weight + (output + (column / width) * outputs) * inputs;
            for (i64 k = 0; k < inputs; ++k)
                target[(k / kLane<T> * kPanel + column) * kLane<T> + k % kLane<T>] = output < outputs ? source[k] : T(0);
        }
    });
}

// ----------------------------------------------------------------------------------------------------- rows and norms

template <class T> void run_embed(Engine& engine, const T* table, bool packed, const std::int32_t* ids, float* residual) {
    const i64 hidden = engine.shape.hidden;
    engine.split(engine.step.num_tokens, 16, [&](i64 first, i64 last, int) {
        for (i64 t = first; t < last; ++t) {
            float* out = residual + t * hidden;
            if (!packed) {
                for (i64 k = 0; k < hidden; k += 16) {
                    const __mmask16 mask = tail_mask(hidden - k);
                    store(out + k, load(table + ids[t] * hidden + k, mask), mask);
                }
                continue;
            }
            const T* source = table + (ids[t] / kPanel * hidden * kPanel) + ids[t] % kPanel * kLane<T>;
            for (i64 k = 0; k < hidden; k += kLane<T>, source += kPanel * kLane<T>)
                for (i64 j = 0; j < kLane<T>; ++j) out[k + j] = to_float(source[j]);
        }
    });
}

// 1 / sqrt(mean(x²) + eps)
template <class T> float inverse_rms(const T* x, i64 n, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (i64 k = 0; k < n; k += 16) {
        const __m512 v = load(x + k, tail_mask(n - k));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / float(n) + eps);
}

template <class T> void run_rms_norm(Engine& engine, const float* residual, const float* weight, i64 rows, T* out) {
    const i64 hidden = engine.shape.hidden;
    engine.split(rows, std::max<i64>(1, 32768 / hidden), [&](i64 first, i64 last, int) {
        for (i64 r = first; r < last; ++r) {
            const float* x = residual + r * hidden;
            const __m512 scale = _mm512_set1_ps(inverse_rms(x, hidden, engine.shape.eps));
            for (i64 k = 0; k < hidden; k += 16) {
                const __mmask16 mask = tail_mask(hidden - k);
                store(out + r * hidden + k, _mm512_mul_ps(_mm512_mul_ps(load(x + k, mask), scale), load(weight + k, mask)),
                      mask);
            }
        }
    });
}

// ------------------------------------------------------------------------------------------------- heads and the cache

template <class T> void norm_and_rotate(const Shape& shape, T* head, const float* norm, const float* cos_sin) {
    if (norm) {
        const __m512 scale = _mm512_set1_ps(inverse_rms(head, shape.head_dim, shape.eps));
        for (i64 d = 0; d < shape.head_dim; d += 16)
            store(head + d, _mm512_mul_ps(_mm512_mul_ps(load(head + d), scale), load(norm + d)));
    }
    if (!cos_sin) return;
    const i64 half = shape.rotary_dim / 2;
    for (i64 d = 0; d < half; d += 16) {
        const __mmask16 mask = tail_mask(half - d);
        const __m512 cosine = load(cos_sin + d, mask), sine = load(cos_sin + half + d, mask);
        const __m512 x = load(head + d, mask), y = load(head + half + d, mask);
        store(head + d, _mm512_fmsub_ps(x, cosine, _mm512_mul_ps(y, sine)), mask);
        store(head + half + d, _mm512_fmadd_ps(y, cosine, _mm512_mul_ps(x, sine)), mask);
    }
}

template <class T, class C>
void store_token(const Engine& engine, const T* key, const T* value, i64 slot, i64 kv_head, C* cache) {
    const Shape& shape = engine.shape;
    const i64 dim = shape.head_dim, size = shape.page_size, place = slot % size;
    C* k = cache + (slot / size * shape.num_kv_heads + kv_head) * 2 * engine.half();
    C* v = k + engine.half();
    C row[2][1024];
    for (i64 d = 0; d < dim; d += 16) {
        store(row[0] + d, load(key + d));
        store(row[1] + d, load(value + d));
    }
    if (!engine.in_place()) {
        std::memcpy(k + place * dim, row[0], dim * sizeof(C));
        std::memcpy(v + place * dim, row[1], dim * sizeof(C));
        return;
    }
    constexpr int lane = kLane<C>;
    for (i64 d = 0; d < dim; d += lane) std::memcpy(k + (d * size + place * lane), row[0] + d, lane * sizeof(C));
    C* v_place = v + (place / lane) * dim * lane + place % lane;
    for (i64 d = 0; d < dim; ++d) v_place[d * lane] = row[1][d];
}

template <class T, class C> void run_rotate_and_store(Engine& engine, T* qkv, const Attention& layer, const float* rope) {
    const Shape& shape = engine.shape;
    const i64 dim = shape.head_dim, heads = shape.num_heads, kv_heads = shape.num_kv_heads;
    engine.split(engine.step.num_tokens, 2, [&](i64 first, i64 last, int) {
        for (i64 t = first; t < last; ++t) {
            T* row = qkv + t * (heads + 2 * kv_heads) * dim;
            const float* cos_sin = layer.uses_rope ? rope + engine.step.positions[t] * shape.rotary_dim : nullptr;
            for (i64 h = 0; h < heads; ++h) norm_and_rotate(shape, row + h * dim, layer.q_norm, cos_sin);
            for (i64 h = 0; h < kv_heads; ++h) {
                T* key = row + (heads + h) * dim;
                norm_and_rotate(shape, key, layer.k_norm, cos_sin);
                store_token(engine, key, key + kv_heads * dim, engine.step.slots[t], h, static_cast<C*>(layer.cache));
            }
        }
    });
}

// ----------------------------------------------------------------------------------------------------------- attention

// Key positions [first, first + count) of one row and kv head, of one segment, as the micro-kernel wants them.
template <class C> struct Segment {
    const C* keys;    // [head_dim / lane][…][lane], steps of key_stride elements
    const C* values;  // [positions / lane][head_dim][lane]
    i64 key_stride;
};

template <class C>
Segment<C> find_segment(const Engine& engine, const C* cache, i64 row, i64 kv_head, i64 first, i64 count, C* scratch) {
    const Shape& shape = engine.shape;
    const i64 dim = shape.head_dim, size = shape.page_size, half = engine.half();
    const std::int32_t* pages = engine.step.page_table + row * engine.step.page_table_width;
    constexpr int lane = kLane<C>;
    if (engine.in_place()) {
        const C* keys = cache + (i64(pages[first / size]) * shape.num_kv_heads + kv_head) * 2 * half;
        const i64 place = first % size;
        return {keys + place * lane, keys + half + place * dim, size * lane};
    }
    C* k = scratch;
    C* v = scratch + kBlock * dim;
    for (i64 i = 0; i < count; ++i) {
        const i64 position = first + i;
        const C* keys = cache + (i64(pages[position / size]) * shape.num_kv_heads + kv_head) * 2 * half + position % size * dim;
        for (i64 d = 0; d < dim; ++d) {
            k[(d / lane * kBlock + i) * lane + d % lane] = keys[d];
            v[(i / lane * dim + d) * lane + i % lane] = keys[half + d];
        }
    }
    return {k, v, kBlock * lane};
}

// One block's share of a query's softmax: scores become weights of C, maximum and sum are carried on. Returns the
// factor for what was accumulated before, or a negative number where the query sees nothing of this block.
template <class C>
float soften(const float* scores, i64 visible_from, i64 visible_to, float scale, float& peak, float& sum, C* weights) {
    const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 scaled[kBlock / 16];
    __m512 top = hidden;
    for (i64 v = 0; v < kBlock / 16; ++v) {
        const i64 from = std::clamp<i64>(visible_from - v * 16, 0, 16), to = std::clamp<i64>(visible_to - v * 16, 0, 16);
        const __mmask16 seen = __mmask16(tail_mask(to) & ~tail_mask(from));
        scaled[v] = _mm512_mask_mul_ps(hidden, seen, load(scores + v * 16), _mm512_set1_ps(scale));
        top = _mm512_max_ps(top, scaled[v]);
    }
    if (visible_from >= visible_to) return -1.0f;
    const float block_peak = _mm512_reduce_max_ps(top);
    const float new_peak = std::max(peak, block_peak);
    __m512 total = _mm512_setzero_ps();
    for (i64 v = 0; v < kBlock / 16; ++v) {
        const __m512 weight = exp2_negative(_mm512_sub_ps(scaled[v], _mm512_set1_ps(new_peak)));
        total = _mm512_add_ps(total, weight);
        store(weights + v * 16, weight);
    }
    const float factor = std::exp2(peak - new_peak);
    sum = sum * factor + _mm512_reduce_add_ps(total);
    peak = new_peak;
    return factor;
}

template <class T, class C> void attend(Engine& engine, const T* qkv, const Attention& layer, const Item& item, T* out, float* scratch) {
    const Shape& shape = engine.shape;
    const Tile& tile = item.tile;
    const i64 dim = shape.head_dim, group = engine.group(), heads = item.last_head - item.head;
    const i64 rows = tile.count * group;  // of each kv head, [token][query head of its group]
    const i64 segment = engine.segment();
    constexpr int lane = kLane<C>;
    float* acc = scratch;
    float* scores = acc + heads * rows * dim;
    float* peaks = scores + rows * kBlock;
    float* sums = peaks + heads * rows;
    C* queries = reinterpret_cast<C*>(sums + heads * rows);
    C* weights = queries + heads * rows * dim;
    C* gathered = weights + rows * kBlock;

    const auto query_head = [&](i64 h, i64 r) { return (item.head + h) * group + r % group; };
    for (i64 h = 0; h < heads; ++h)
        for (i64 r = 0; r < rows; ++r) {
            const i64 token = tile.token + r / group;
            const T* q = qkv + (token * (shape.num_heads + 2 * shape.num_kv_heads) + query_head(h, r)) * dim;
            for (i64 d = 0; d < dim; d += 16) store(queries + (h * rows + r) * dim + d, load(q + d));
            peaks[h * rows + r] = -std::numeric_limits<float>::infinity();
            sums[h * rows + r] = 0.0f;
        }
    std::memset(acc, 0, heads * rows * dim * sizeof(float));

    const float scale = kLog2E / std::sqrt(float(dim));
    const i64 end = tile.position + tile.count;
    const i64 start = layer.window ? std::max<i64>(0, tile.position - layer.window + 1) : 0;
    const C* cache = static_cast<const C*>(layer.cache);
    for (i64 first = start / kBlock * kBlock; first < end; first += kBlock) {
        const i64 block_end = std::min(first + kBlock, end);
        for (i64 h = 0; h < heads; ++h) {
            const C* head_queries = queries + h * rows * dim;
            float* head_acc = acc + h * rows * dim;
            Segment<C> found[kBlock / 16];
            for (i64 at = first, i = 0; at < block_end; at += segment, ++i) {
                found[i] = find_segment<C>(engine, cache, tile.row, item.head + h, at, block_end - at, gathered);
                product(rows, segment, head_queries, dim, found[i].keys, found[i].key_stride, dim / lane,
                        scores + (at - first), kBlock, false);
            }
            for (i64 r = 0; r < rows; ++r) {
                const i64 position = tile.position + r / group;
                const i64 from = layer.window ? std::max<i64>(0, position - layer.window + 1 - first) : 0;
                const i64 to = std::min<i64>(kBlock, position + 1 - first);
                const float factor = soften(scores + r * kBlock, from, to, scale, peaks[h * rows + r], sums[h * rows + r],
                                            weights + r * kBlock);
                if (factor < 0.0f) {
                    std::memset(weights + r * kBlock, 0, kBlock * sizeof(C));
                } else if (factor != 1.0f) {
                    for (i64 d = 0; d < dim; d += 16)
                        store(head_acc + r * dim + d, _mm512_mul_ps(load(head_acc + r * dim + d), _mm512_set1_ps(factor)));
                }
            }
            for (i64 at = first, i = 0; at < block_end; at += segment, ++i) {
                const i64 count = std::min(segment, block_end - at), whole = count / lane;
                const C* segment_weights = weights + (at - first);
                product(rows, dim, segment_weights, kBlock, found[i].values, dim * lane, whole, head_acc, dim, true);
                if (count % lane == 0) continue;
                // The last pair's second position is not written yet and may hold anything, NaN too.
                C* pair = gathered;
                for (i64 d = 0; d < dim; ++d) {
                    pair[d * lane] = found[i].values[(whole * dim + d) * lane];
                    pair[d * lane + 1] = 0;
                }
                product(rows, dim, segment_weights + whole * lane, kBlock, pair, dim * lane, 1, head_acc, dim, true);
            }
        }
    }
    for (i64 h = 0; h < heads; ++h)
        for (i64 r = 0; r < rows; ++r) {
            const __m512 norm = _mm512_set1_ps(1.0f / sums[h * rows + r]);
            T* target = out + ((tile.out + r / group) * shape.num_heads + query_head(h, r)) * dim;
            for (i64 d = 0; d < dim; d += 16) store(target + d, _mm512_mul_ps(load(acc + (h * rows + r) * dim + d), norm));
        }
}

template <class T, class C> void run_attention(Engine& engine, const T* qkv, const Attention& layer, bool last, T* out) {
    const std::vector<Item>& items = last ? engine.step.last_items : engine.step.items;
    engine.pool.run(i64(items.size()), [&](i64 chunk, int thread) {
        attend<T, C>(engine, qkv, layer, items[chunk], out, engine.scratch[thread].data());
    });
}

// ----------------------------------------------------------------------------------------------------------- the step

// A single token takes all heads of its row at once where there are tokens enough for the threads, and a longer tile
// one. Cheapest first: the pool takes the last chunk first.
std::vector<Item> make_items(const Engine& engine, const std::vector<Tile>& tiles) {
    const i64 kv_heads = engine.shape.num_kv_heads;
    const bool many = i64(tiles.size()) >= 4 * engine.pool.num_threads();
    std::vector<Item> items;
    for (const Tile& tile : tiles) {
        const i64 heads = many && tile.count == 1 ? kv_heads : 1;
        for (i64 h = 0; h < kv_heads; h += heads) items.push_back({tile, h, h + heads});
    }
    const auto cost = [](const Item& item) {
        return item.tile.count * (item.tile.position + item.tile.count) * (item.last_head - item.head);
    };
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return cost(a) < cost(b); });
    return items;
}

void plan_step(Engine& engine, const std::int32_t* starts, const std::int32_t* contexts, i64 num_rows,
               const std::int32_t* page_table, i64 table_width, const std::int32_t* logit_rows, i64 num_logits) {
    Step& step = engine.step;
    const i64 size = engine.shape.page_size;
    const i64 tile_tokens = engine.tile_rows() / engine.group();
    step.page_table = page_table;
    step.page_table_width = table_width;
    step.num_tokens = starts[num_rows];
    step.positions.resize(step.num_tokens);
    step.slots.resize(step.num_tokens);
    step.last_tokens.clear();
    std::vector<Tile> tiles, last_tiles;
    for (i64 row = 0; row < num_rows; ++row) {
        const i64 length = starts[row + 1] - starts[row];
        for (i64 i = 0; i < length; ++i) {
            const i64 position = contexts[row] + i;
            step.positions[starts[row] + i] = std::int32_t(position);
            step.slots[starts[row] + i] = page_table[row * table_width + position / size] * size + position % size;
        }
        for (i64 i = 0; i < length; i += tile_tokens) {
            const i64 token = starts[row] + i;
            tiles.push_back({row, token, std::min(tile_tokens, length - i), contexts[row] + i, token});
        }
    }
    for (i64 i = 0; i < num_logits; ++i) {
        const i64 row = logit_rows[i], token = starts[row + 1] - 1;
        step.last_tokens.push_back(token);
        last_tiles.push_back({row, token, 1, step.positions[token], i});
    }
    step.items = make_items(engine, tiles);
    step.last_items = make_items(engine, last_tiles);
}

}  // namespace

// ------------------------------------------------------------------------------------------------------- the C functions

extern "C" {

int ps_abi() { return 1; }

void* ps_create(int num_threads, i64 spin_ns, const Shape* shape) { return new Engine(num_threads, spin_ns, *shape); }

void ps_destroy(void* engine) { delete static_cast<Engine*>(engine); }

void ps_set_cache(void* engine, i64 page_size, i64 cache_bf16) {
    static_cast<Engine*>(engine)->shape.page_size = page_size;
    static_cast<Engine*>(engine)->shape.cache_bf16 = cache_bf16;
}

i64 ps_packed_elements(i64 inputs, i64 outputs, i64 gated) {
    const i64 width = gated ? kPanel / 2 : kPanel;
    return (outputs + width - 1) / width * kPanel * inputs;
}

void ps_pack(void* engine, const void* weight, i64 inputs, i64 outputs, i64 gated, void* packed) {
    Engine& e = *static_cast<Engine*>(engine);
    if (e.shape.act_bf16) pack_weight(e, static_cast<const bf16*>(weight), inputs, outputs, gated, static_cast<bf16*>(packed));
    else pack_weight(e, static_cast<const float*>(weight), inputs, outputs, gated, static_cast<float*>(packed));
}

void ps_plan(void* engine, const std::int32_t* starts, const std::int32_t* contexts, i64 num_rows,
             const std::int32_t* page_table, i64 table_width, const std::int32_t* logit_rows, i64 num_logits) {
    plan_step(*static_cast<Engine*>(engine), starts, contexts, num_rows, page_table, table_width, logit_rows, num_logits);
}

void ps_embed(void* engine, const void* table, i64 packed, const std::int32_t* ids, float* residual) {
    Engine& e = *static_cast<Engine*>(engine);
    if (e.shape.act_bf16) run_embed(e, static_cast<const bf16*>(table), packed, ids, residual);
    else run_embed(e, static_cast<const float*>(table), packed, ids, residual);
}

void ps_rms_norm(void* engine, const float* residual, const float* weight, i64 rows, void* out) {
    Engine& e = *static_cast<Engine*>(engine);
    if (e.shape.act_bf16) run_rms_norm(e, residual, weight, rows, static_cast<bf16*>(out));
    else run_rms_norm(e, residual, weight, rows, static_cast<float*>(out));
}

void ps_linear(void* engine, const Linear* linear, i64 output, const void* x, i64 rows, void* out) {
    Engine& e = *static_cast<Engine*>(engine);
    if (e.shape.act_bf16) run_linear(e, *linear, output, static_cast<const bf16*>(x), rows, out);
    else run_linear(e, *linear, output, static_cast<const float*>(x), rows, out);
}

void ps_rotate_and_store(void* engine, void* qkv, const Attention* layer, const float* rope) {
    Engine& e = *static_cast<Engine*>(engine);
    if (e.shape.act_bf16) {
        if (e.shape.cache_bf16) run_rotate_and_store<bf16, bf16>(e, static_cast<bf16*>(qkv), *layer, rope);
        else run_rotate_and_store<bf16, float>(e, static_cast<bf16*>(qkv), *layer, rope);
    } else {
        if (e.shape.cache_bf16) run_rotate_and_store<float, bf16>(e, static_cast<float*>(qkv), *layer, rope);
        else run_rotate_and_store<float, float>(e, static_cast<float*>(qkv), *layer, rope);
    }
}

void ps_attention(void* engine, const void* qkv, const Attention* layer, i64 last, void* out) {
    Engine& e = *static_cast<Engine*>(engine);
    if (e.shape.act_bf16) {
        const bf16* x = static_cast<const bf16*>(qkv);
        if (e.shape.cache_bf16) run_attention<bf16, bf16>(e, x, *layer, last, static_cast<bf16*>(out));
        else run_attention<bf16, float>(e, x, *layer, last, static_cast<bf16*>(out));
    } else {
        const float* x = static_cast<const float*>(qkv);
        if (e.shape.cache_bf16) run_attention<float, bf16>(e, x, *layer, last, static_cast<float*>(out));
        else run_attention<float, float>(e, x, *layer, last, static_cast<float*>(out));
    }
}

// The residual rows of the last tokens of the logit rows.
void ps_take_last(void* engine, const float* residual, float* out) {
    Engine& e = *static_cast<Engine*>(engine);
    const i64 hidden = e.shape.hidden;
    for (size_t i = 0; i < e.step.last_tokens.size(); ++i)
        std::memcpy(out + i64(i) * hidden, residual + e.step.last_tokens[i] * hidden, hidden * sizeof(float));
}

}  // extern "C"

// A product reads its operands at the latest allowed moment, when a thread waits for it; in the reverse order when it
// starts; in the random order at either. Until a thread's wait, its accumulators are NaN.

#include "warpgroup.h"

#include <string.h>

#include <memory>

#include "checker.h"
#include "matrix.h"
#include "scheduler.h"

namespace cusim {
namespace {

constexpr int kThreads = 128, kRows = 64, kDepth = 16, kMaxColumns = 128;
constexpr int kRegistersOfBlock = 65536;

struct Product {
    Product() {}  // does not fill the sums with zeros first

    Here here;
    const void* site;
    Number number;
    int columns;
    bool a_in_registers, b_by_rows, adds;
    uint64_t a, b;  // descriptors
    unsigned a_registers[kThreads][4];
    float* accumulators[kThreads];
    std::shared_ptr<Product> before;  // on the same accumulators, and still under way when this one started
    float sums[kRows][kMaxColumns];   // at the start, and then the result
    bool is_done = false;
};
using ProductPointer = std::shared_ptr<Product>;

ProductPointer start_product(Here here, const void* site, Number number, int columns, bool a_in_registers,
                             bool b_by_rows, bool adds, uint64_t a, uint64_t b) {
    const ProductPointer product = std::make_shared<Product>();
    product->here = here;
    product->site = site;
    product->number = number;
    product->columns = columns;
    product->a_in_registers = a_in_registers;
    product->b_by_rows = b_by_rows;
    product->adds = adds;
    product->a = a;
    product->b = b;
    return product;
}

struct Queue {
    std::vector<ProductPointer> open;                 // in no group yet
    std::vector<std::vector<ProductPointer>> groups;  // committed
    bool is_fenced = false;  // since other instructions may have accessed the registers of products
};

// The product that a warpgroup's threads are about to start.
struct Meeting {
    ProductPointer product;
    int num_here = 0;
    std::vector<Thread*> waiting;
};

std::vector<Queue> queues;
std::vector<Meeting> meetings;
std::vector<int> registers;    // per thread; 0: as many as at the launch
bool products_in_use = false;  // any of these, by threads of this block

Queue& queue_of_current() {
    products_in_use = true;
    return queues[size_t(current->number)];
}

struct Place {
    int row, column;
};

// Of number i of the 4 in a thread's fragment for 8 columns, in the warpgroup's matrix.
Place place_of(int thread, int block, int i) {
    const int lane = thread % 32;
    return {thread / 32 * 16 + lane / 4 + i / 2 * 8, block * 8 + lane % 4 * 2 + i % 2};
}

// A matrix descriptor, as the PTX manual has it.
struct Matrix {
    size_t start, leading_bytes, stride_bytes;

    explicit Matrix(uint64_t bits, Here here)
        : start((bits & 0x3fff) << 4), leading_bytes((bits >> 16 & 0x3fff) << 4),
          stride_bytes((bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1)
            fail("wgmma at %s:%d: the emulator supports swizzling by 128 bytes only", here.file, here.line);
        if (start & 0x380) fail("wgmma at %s:%d: 8 rows that do not begin at a multiple of 1024", here.file, here.line);
        if (bits >> 49 & 7) fail("wgmma at %s:%d: a base offset other than 0", here.file, here.line);
        if (bits & 0x3ff1c000c000c000)
            fail("wgmma at %s:%d: reserved bits of a descriptor are set", here.file, here.line);
    }
    // 16 bytes: along k, number k = 8 · chunk of row n; of a matrix by rows, number n = 8 · chunk of row k.
    unsigned char* along_k(int n, int chunk) const {
        return at(start + size_t(n / 8) * stride_bytes + size_t(n % 8) * 128 + size_t(chunk) * 16);
    }
    unsigned char* by_rows(int k, int chunk) const {
        return at(start + size_t(chunk / 8) * leading_bytes + size_t(k / 8) * stride_bytes + size_t(k % 8) * 128 +
                  size_t(chunk % 8) * 16);
    }

  private:
    static unsigned char* at(size_t offset) { return swizzled_128(machine.dynamic_shared + offset); }
};

float to_float(Number number, uint16_t bits) {
    return number == Number::kBf16 ? bf16_to_float(bits) : half_to_float(bits);
}

typedef float Numbers __attribute__((vector_size(32), aligned(4)));  // 8 neighbours in a row

// The 8 numbers of 16 bytes, which go to numbers[0], numbers[stride] and so on.
void read_8(Number number, const unsigned char* bytes, float* numbers, int stride) {
    uint16_t bits[8];
    memcpy(bits, bytes, sizeof bits);
    for (int i = 0; i < 8; ++i) numbers[i * stride] = to_float(number, bits[i]);
}

// Call visit with each 16 bytes that a warp reads.
template <class F> void for_each_operand(const Product& product, int warp, const F& visit) {
    if (!product.a_in_registers) {
        const Matrix a(product.a, product.here);
        for (int row = warp * 16; row < warp * 16 + 16; ++row)
            for (int chunk = 0; chunk < 2; ++chunk) visit(a.along_k(row, chunk));
    }
    const Matrix b(product.b, product.here);
    for (int i = 0; i < (product.b_by_rows ? kDepth : product.columns); ++i)
        for (int chunk = 0; chunk < (product.b_by_rows ? product.columns / 8 : 2); ++chunk)
            visit(product.b_by_rows ? b.by_rows(i, chunk) : b.along_k(i, chunk));
}

void check_reads(const Product& product, Thread& lane) {
    current->here = product.here;
    for_each_operand(product, lane.warp % 4, [&](const unsigned char* bytes) {
        check_shared(bytes, 16, 16, "wgmma");
        check_access_of(lane, bytes, 16, Access::kProductReads, product.site);
    });
}

void compute(Product& product) {
    if (product.is_done) return;
    product.is_done = true;
    if (product.before) {
        compute(*product.before);
        memcpy(product.sums, product.before->sums, sizeof product.sums);
        product.before = nullptr;
    }
    if (!product.adds) memset(product.sums, 0, sizeof product.sums);
    float a[kRows][kDepth], b[kDepth][kMaxColumns];
    if (product.a_in_registers) {
        // Registers 0 to 3: columns 2t and 2t + 1 of rows g and g + 8, then columns 2t + 8 and 2t + 9.
        for (int thread = 0; thread < kThreads; ++thread)
            for (int i = 0; i < 8; ++i) {
                const Place place = place_of(thread, i / 4, i % 4);
                const unsigned pair = product.a_registers[thread][i / 2];
                a[place.row][place.column] = to_float(product.number, uint16_t(pair >> 16 * (i % 2)));
            }
    } else {
        const Matrix from(product.a, product.here);
        for (int row = 0; row < kRows; ++row)
            for (int chunk = 0; chunk < 2; ++chunk) read_8(product.number, from.along_k(row, chunk), &a[row][8 * chunk], 1);
    }
    const Matrix from(product.b, product.here);
    for (int k = 0; k < (product.b_by_rows ? kDepth : 0); ++k)
        for (int chunk = 0; chunk < product.columns / 8; ++chunk)
            read_8(product.number, from.by_rows(k, chunk), &b[k][8 * chunk], 1);
    for (int n = 0; n < (product.b_by_rows ? 0 : product.columns); ++n)
        for (int chunk = 0; chunk < 2; ++chunk)
            read_8(product.number, from.along_k(n, chunk), &b[8 * chunk][n], kMaxColumns);
    for (int row = 0; row < kRows; ++row)
        for (int n = 0; n < product.columns; n += 8) {
            Numbers& sums = *reinterpret_cast<Numbers*>(&product.sums[row][n]);
            for (int k = 0; k < kDepth; ++k) sums += a[row][k] * *reinterpret_cast<const Numbers*>(&b[k][n]);
        }
}

template <class F> void for_each_accumulator(const Product& product, int thread, const F& visit) {
    for (int block = 0; block < product.columns / 8; ++block)
        for (int i = 0; i < 4; ++i) visit(product.accumulators[thread][4 * block + i], place_of(thread, block, i));
}

// The thread's last product under way on these accumulators, or null.
ProductPointer last_on(const Queue& queue, const float* accumulators, int thread) {
    ProductPointer last;
    const auto look_in = [&](const std::vector<ProductPointer>& products) {
        for (const ProductPointer& product : products)
            if (product->accumulators[thread] == accumulators) last = product;
    };
    for (const std::vector<ProductPointer>& group : queue.groups) look_in(group);
    look_in(queue.open);
    return last;
}

void land(const Product& product) {
    const int thread = current->number % kThreads;
    // A later product on the same accumulators is still under way: they stay NaN.
    if (last_on(queues[size_t(current->number)], product.accumulators[thread], thread)) return;
    for_each_accumulator(product, thread, [&](float& x, Place at) { x = product.sums[at.row][at.column]; });
}

void join(Product& product, float* accumulators, const unsigned* a) {
    const int thread = current->number % kThreads;
    Queue& queue = queues[size_t(current->number)];
    const ProductPointer before = last_on(queue, accumulators, thread);
    product.accumulators[thread] = accumulators;
    if (before) product.before = before;
    else for_each_accumulator(product, thread, [&](float x, Place at) { product.sums[at.row][at.column] = x; });
    if (a) memcpy(product.a_registers[thread], a, sizeof product.a_registers[thread]);
    for_each_accumulator(product, thread, [](float& x, Place) { memset(&x, 0xff, sizeof x); });
}

}  // namespace

void reset_products() {
    if (!products_in_use && queues.size() == threads.size()) return;
    products_in_use = false;
    queues.assign(threads.size(), {});
    meetings.assign(threads.size() / kThreads, {});
    registers.assign(threads.size(), 0);
}

void wgmma(Number number, float* accumulators, int columns, const unsigned* a, uint64_t a_descriptor,
           uint64_t b_descriptor, bool b_by_rows, bool adds, Here here) {
    current->here = here;
    const size_t warpgroup = size_t(current->number / kThreads);
    if (warpgroup >= meetings.size()) fail("wgmma at %s:%d in an incomplete warpgroup", here.file, here.line);
    if (!queue_of_current().is_fenced)
        fail("wgmma at %s:%d without a wgmma.fence since the last wait", here.file, here.line);
    Meeting& meeting = meetings[warpgroup];
    if (!meeting.product)
        meeting.product = start_product(here, __builtin_return_address(0), number, columns, a != nullptr, b_by_rows,
                                        adds, a_descriptor, b_descriptor);
    const ProductPointer product = meeting.product;
    if (product->here.line != here.line || product->here.file != here.file || product->a != a_descriptor ||
        product->b != b_descriptor || product->adds != adds)
        fail("mismatched wgmma: this thread is at %s:%d, others of its warpgroup at %s:%d, or have other operands",
             here.file, here.line, product->here.file, product->here.line);
    join(*product, accumulators, a);
    queue_of_current().open.push_back(product);
    if (++meeting.num_here < kThreads) {
        meeting.waiting.push_back(current);
        return wait(Status::kInWarpgroupCall);
    }
    const std::vector<Thread*> waiting = std::move(meeting.waiting);
    meeting = {};
    for (int warp = 0; warp < 4; ++warp) check_reads(*product, threads[warpgroup * kThreads + size_t(warp) * 32]);
    if (order == Order::kReverse || (order == Order::kRandom && random_number() % 2)) compute(*product);
    for (Thread* thread : waiting) make_ready(*thread);
    yield_to_ready();
}

void wgmma_fence() { queue_of_current().is_fenced = true; }

void wgmma_commit() {
    Queue& queue = queue_of_current();
    queue.groups.push_back(std::move(queue.open));
    queue.open.clear();
}

void wgmma_wait(int allowed_groups) {
    Queue& queue = queue_of_current();
    while (queue.groups.size() > size_t(allowed_groups)) {
        const std::vector<ProductPointer> group = std::move(queue.groups.front());
        queue.groups.erase(queue.groups.begin());
        queue.is_fenced = false;
        for (size_t i = 0; i < group.size(); ++i) {
            Product& product = *group[i];
            // Lane 0 stands for its warp.
            if (current->lane == 0) check_reads(product, *current);
            compute(product);
            bool is_last = true;
            for (size_t j = i + 1; j < group.size(); ++j)
                is_last &= group[j]->accumulators[current->number % kThreads] !=
                           product.accumulators[current->number % kThreads];
            if (is_last) land(product);
        }
    }
}

void check_products_awaited() {
    if (!products_in_use) return;
    const Queue& queue = queues[size_t(current->number)];
    if (queue.open.empty() && queue.groups.empty()) return;
    const Here here = queue.groups.empty() ? queue.open.back()->here : queue.groups.back().back()->here;
    fail("wgmma not awaited: this thread ends with products under way, the last begun at %s:%d", here.file, here.line);
}

void set_registers(int number) {
    products_in_use = true;
    registers[size_t(current->number)] = number;
}

void check_registers() {
    if (!products_in_use) return;
    // A launch gives each thread as many: multiples of 8.
    const int num_threads = int(registers.size()), most = kRegistersOfBlock / num_threads / 8 * 8 * num_threads;
    int total = 0;
    for (const int number : registers) {
        if (number == 0) return;
        total += number;
    }
    if (total > most) fail("setmaxnreg: the block's threads have %d registers in all, of %d", total, most);
}

}  // namespace cusim

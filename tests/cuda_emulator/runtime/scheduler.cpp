#include "scheduler.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>

#include <utility>

#include "async_copies.h"
#include "boxes.h"
#include "dependent_launch.h"
#include "waiting.h"
#include "warpgroup.h"

// Push the callee-saved registers, save the stack pointer in *save, and continue where `load` was saved.
extern "C" void cusim_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.globl cusim_switch
.hidden cusim_switch
cusim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
constexpr int kSavedRegisters = 6;
#else
#error "the emulator switches between threads on x86-64 only"
#endif

namespace cusim {

Machine machine;
std::vector<Thread> threads;
Thread* current;
int num_alive;
Order order;
std::string error;

namespace {

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 << 10, kGuardBytes = 4096;

char* stacks;  // kMaxThreads stacks, each with a protected guard page at its lower end
std::vector<int> free_stacks;  // last in, first out, because caches still hold the last one
void* launcher_stack_pointer;
const Kernel* running;
void** running_arguments;
uint64_t random_state;

// A ring buffer. No thread is in it twice, so it never holds more than kMaxThreads.
class ReadyQueue {
  public:
    void clear() { first_ = count_ = 0; }
    bool empty() const { return count_ == 0; }
    void push(int thread) { ring_[(first_ + count_++) % kMaxThreads] = thread; }
    int pop() {
        if (order == Order::kRandom) {
            const size_t chosen = (first_ + random_number() % count_) % kMaxThreads;
            std::swap(ring_[chosen], ring_[first_]);
        }
        const int thread = ring_[first_];
        first_ = (first_ + 1) % kMaxThreads;
        --count_;
        return thread;
    }

  private:
    int ring_[kMaxThreads];
    size_t first_ = 0, count_ = 0;
};

ReadyQueue ready;

void enter(Thread& thread) {
    current = &thread;
    machine.thread_index = thread.index;
    machine.lane = unsigned(thread.lane);
}

char* stack_at(int index) { return stacks + size_t(index) * (kStackBytes + kGuardBytes) + kGuardBytes; }

void thread_main();

// Prepare a stack as cusim_switch leaves it: the saved registers, the address at which to continue, and above it a
// return address. Stack tops have different offsets within a page, because otherwise they would compete for the same
// cache lines.
void* first_stack_pointer(int index) {
    void** top = reinterpret_cast<void**>(stack_at(index) + kStackBytes - 64 - size_t(index % 64) * 448);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(thread_main);
    for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
    return top;
}

void resume(void** save, Thread& thread) {
    if (!thread.stack_pointer) {
        thread.stack = free_stacks.back();
        free_stacks.pop_back();
        thread.stack_pointer = first_stack_pointer(thread.stack);
    }
    enter(thread);
    cusim_switch(save, thread.stack_pointer);
}

[[noreturn]] void return_to_launcher() {
    void* never_resumed;
    cusim_switch(&never_resumed, launcher_stack_pointer);
    __builtin_unreachable();
}

[[noreturn]] void fail_deadlocked();

// A copy may have to arrive before any thread can go on.
int pop_ready() {
    maybe_land_a_box();
    while (ready.empty())
        if (!land_a_box()) fail_deadlocked();
    return ready.pop();
}

[[noreturn]] void fail_deadlocked() {
    std::string waiting;
    int num_named = 0;
    for (const Thread& thread : threads) {
        if (thread.status == Status::kDone || num_named++ == 4) continue;
        char line[256];
        snprintf(line, sizeof line, "; thread %d waits at %s:%d", thread.number, thread.here.file, thread.here.line);
        waiting += line;
        if (thread.status == Status::kInWarpCall) {
            snprintf(line, sizeof line, " for the lanes of mask %08x", thread.mask);
            waiting += line;
        }
    }
    fail("deadlock: %d threads wait for others that never come%s", num_alive, waiting.c_str());
}

void end_thread() {
    check_copies_awaited();
    check_products_awaited();
    check_waited();
    current->status = Status::kDone;
    --num_alive;
    check_exit_leaves_no_barrier();
    if (num_alive > 0) return;
    check_boxes_landed();
    check_registers();
    return_to_launcher();
}

// Every stack begins here. A thread that has not started takes over the stack of the thread that ended before it.
void thread_main() {
    while (true) {
        running->run(running_arguments);
        end_thread();
        const int stack = current->stack;
        Thread& next = threads[size_t(pop_ready())];
        if (next.stack_pointer) {
            free_stacks.push_back(stack);
            void* never_resumed;
            resume(&never_resumed, next);
        }
        next.stack = stack;
        next.stack_pointer = &next;  // not null, so it has started; cusim_switch saves the real value when it waits
        enter(next);
    }
}

void map_stacks() {
    const size_t bytes = kMaxThreads * (kStackBytes + kGuardBytes);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        fprintf(stderr, "no memory for the stacks of emulated threads\n");
        abort();
    }
    stacks = static_cast<char*>(memory);
    for (int i = 0; i < kMaxThreads; ++i) mprotect(stack_at(i) - kGuardBytes, kGuardBytes, PROT_NONE);
}

}  // namespace

void prepare_threads(int num_threads, uint3 block_dim, Order new_order, uint64_t seed) {
    if (!stacks) map_stacks();
    order = new_order;
    random_state = seed * 2 + 1;
    machine.block_dim = block_dim;
    threads.assign(size_t(num_threads), Thread{});
    for (int i = 0; i < num_threads; ++i) {
        const unsigned number = unsigned(i);
        Thread& thread = threads[number];
        thread.number = int16_t(i);
        thread.lane = int16_t(i % 32);
        thread.warp = int16_t(i / 32);
        thread.index = {number % block_dim.x, number / block_dim.x % block_dim.y, number / block_dim.x / block_dim.y};
    }
}

uint64_t random_number() {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return random_state >> 33;
}

bool on_a_stack(uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(stacks) < kMaxThreads * (kStackBytes + kGuardBytes);
}

void run_block(const Kernel& kernel, void** arguments) {
    running = &kernel;
    running_arguments = arguments;
    ready.clear();
    num_alive = int(threads.size());
    for (Thread& thread : threads) {
        thread.stack_pointer = nullptr;
        thread.status = Status::kReady;
        thread.has_waited = false;
    }
    free_stacks.resize(threads.size());
    for (int i = 0; i < num_alive; ++i) free_stacks[size_t(i)] = num_alive - 1 - i;
    for (int i = 0; i < num_alive; ++i) ready.push(order == Order::kReverse ? num_alive - 1 - i : i);
    resume(&launcher_stack_pointer, threads[size_t(ready.pop())]);
    current = nullptr;
}

void make_ready(Thread& thread) {
    thread.status = Status::kReady;
    ready.push(thread.number);
}

void wait(Status status) {
    Thread* me = current;
    me->status = status;
    Thread& next = threads[size_t(pop_ready())];
    if (&next != me) resume(&me->stack_pointer, next);
}

void yield_to_ready() {
    if (order == Order::kForward) return;
    make_ready(*current);
    wait(Status::kReady);
}

void fail(const char* format, ...) {
    char text[1500];
    const uint3 block = machine.block_index, thread = machine.thread_index;
    const int length = snprintf(text, sizeof text, "block (%u,%u,%u) thread (%u,%u,%u): ", block.x, block.y, block.z,
                                thread.x, thread.y, thread.z);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + length, sizeof text - size_t(length), format, arguments);
    va_end(arguments);
    error = text;
    return_to_launcher();
}

}  // namespace cusim

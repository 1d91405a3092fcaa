// A copy of a box arrives when no thread can go on without it; in the reverse order at once; in the random order at any
// time. The first shows a missing wait, the second a buffer that is still in use.

#include "boxes.h"

#include <string.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "checker.h"
#include "order.h"
#include "scheduler.h"

namespace cusim {
namespace {

struct State {
    int count, pending;  // arrivals
    long long bytes;     // announced and not there yet
    unsigned phase;      // number of the current one
    int number;          // among the block's barriers
    Clocks arrived, done;  // what arrivals have ordered: all so far, and those of the phases that have ended
    uint32_t num_boxes;
    Moment start;  // of its initialisation
    std::vector<Thread*> waiting;
};

struct Box {
    TensorMap map;
    unsigned char* target;
    int row, column;
    uintptr_t barrier;
    Moment moment;
    Here here;
};

struct NumberedBarrier {
    int count;
    std::vector<Thread*> arrived, waiting;
    Clocks clocks;
    Here here;  // where threads wait
};

constexpr int kNumbered = 16;

std::unordered_map<uintptr_t, State> states;
std::vector<Box> boxes;  // in flight, in the order of their starts
NumberedBarrier numbered[kNumbered];

constexpr int kElementBytes = 2;
constexpr uintptr_t kRowBytes = 128, kAlignment = 128;

uintptr_t number_of(const void* address) { return reinterpret_cast<uintptr_t>(address); }

State& state_of(const unsigned long long* barrier, const char* instruction, Here here) {
    current->here = here;
    const auto found = states.find(number_of(barrier));
    if (found == states.end()) fail("%s at %s:%d on memory that is no initialised barrier", instruction, here.file,
                                    here.line);
    return found->second;
}

void end_phase_if_done(State& state) {
    if (state.pending > 0 || state.bytes != 0) return;
    ++state.phase;
    state.pending = state.count;
    state.done = state.arrived;
    for (Thread* thread : state.waiting) make_ready(*thread);
    state.waiting.clear();
}

void land(const Box& box) {
    const TensorMap& map = box.map;
    for (int i = 0; i < map.box_rows; ++i) {
        for (int chunk = 0; chunk < int(kRowBytes) / 16; ++chunk) {
            unsigned char* to = swizzled_128(box.target + size_t(i) * kRowBytes + size_t(chunk) * 16);
            const long long row = box.row + i, column = box.column + chunk * 16 / kElementBytes;
            const bool exists = row >= 0 && row < map.rows && column >= 0 && column < map.columns;
            if (exists) memcpy(to, map.base + row * map.row_bytes + column * kElementBytes, 16);
            else memset(to, 0, 16);
        }
    }
    const size_t num_bytes = size_t(map.box_rows) * kRowBytes;
    box_lands(box.target, num_bytes, box.moment);
    State& state = states.at(box.barrier);
    state.bytes -= (long long)num_bytes;
    note_copy(state.arrived, box.moment);
    end_phase_if_done(state);
}

void land_at(size_t place) {
    const Box box = boxes[place];
    boxes.erase(boxes.begin() + long(place));
    land(box);
}

NumberedBarrier& join(int number, int count, Here here) {
    current->here = here;
    if (number < 1 || number >= kNumbered || count < 32 || count % 32 != 0)
        fail("barrier %d at %s:%d for %d threads", number, here.file, here.line, count);
    NumberedBarrier& met = numbered[number];
    if (met.arrived.empty()) met.count = count;
    if (met.count != count)
        fail("barrier %d at %s:%d is for %d threads, but others call it for %d", number, here.file, here.line, count,
             met.count);
    if (std::find(met.arrived.begin(), met.arrived.end(), current) != met.arrived.end())
        fail("barrier %d at %s:%d: this thread arrives twice before the others", number, here.file, here.line);
    release_to(met.clocks);
    met.arrived.push_back(current);
    return met;
}

void let_go(NumberedBarrier& met) {
    const NumberedBarrier done = std::exchange(met, {});
    for (Thread* thread : done.waiting) {
        acquire_for(*thread, done.clocks);
        if (thread != current) make_ready(*thread);
    }
    yield_to_ready();
}

void check_box(const Box& box) {
    const TensorMap& map = box.map;
    const Here here = box.here;
    if (map.box_columns * kElementBytes != int(kRowBytes))
        fail("copy of a box at %s:%d: its rows have %d bytes, not 128", here.file, here.line,
             map.box_columns * kElementBytes);
    check_shared(box.target, size_t(map.box_rows) * kRowBytes, kAlignment, "copy of a box");
}

}  // namespace

unsigned char* swizzled_128(unsigned char* address) {
    const size_t offset = size_t(address - machine.dynamic_shared);
    return machine.dynamic_shared + (offset ^ (offset >> 3 & 0x70));
}

unsigned shared_offset(const void* address) {
    return unsigned(static_cast<const unsigned char*>(address) - machine.dynamic_shared);
}

void reset_barriers() {
    states.clear();
    boxes.clear();
    for (NumberedBarrier& barrier : numbered) barrier = {};
}

bool land_a_box() {
    if (boxes.empty()) return false;
    land_at(order == Order::kRandom ? random_number() % boxes.size() : 0);
    return true;
}

void maybe_land_a_box() {
    if (order == Order::kRandom && !boxes.empty() && random_number() % 4 == 0) land_a_box();
}

void check_boxes_landed() {
    if (boxes.empty()) return;
    fail("copy of a box not awaited: the block ends with %zu under way, the first begun at %s:%d", boxes.size(),
         boxes[0].here.file, boxes[0].here.line);
}

void barrier_init(unsigned long long* barrier, int count, Here here) {
    current->here = here;
    check_shared(barrier, 8, 8, "mbarrier.init");
    check_access(barrier, 8, Access::kWrite, __builtin_return_address(0));
    State state{};
    state.count = state.pending = count;
    state.number = int(states.size());
    state.start = moment_now();
    states[number_of(barrier)] = state;
}

void barrier_arrive(unsigned long long* barrier, int num_bytes, Here here) {
    State& state = state_of(barrier, "mbarrier.arrive", here);
    check_access(barrier, 8, Access::kAtomic, __builtin_return_address(0));
    if (state.pending == 0)
        fail("mbarrier.arrive at %s:%d: all %d arrivals of this phase have come", here.file, here.line, state.count);
    release_to(state.arrived);
    --state.pending;
    state.bytes += num_bytes;
    end_phase_if_done(state);
    yield_to_ready();
}

void barrier_wait(unsigned long long* barrier, unsigned parity, Here here) {
    State& state = state_of(barrier, "mbarrier.try_wait", here);
    check_access(barrier, 8, Access::kAtomic, __builtin_return_address(0));
    if (parity > 1) fail("mbarrier.try_wait at %s:%d for parity %u", here.file, here.line, parity);
    while ((state.phase & 1) == parity) {
        state.waiting.push_back(current);
        wait(Status::kAtBarrier);
    }
    acquire_for(*current, state.done);
}

void sync_some(int barrier, int count, Here here) {
    NumberedBarrier& met = join(barrier, count, here);
    if (met.waiting.empty()) met.here = here;
    if (met.here.line != here.line || met.here.file != here.file)
        fail("divergent barrier: this thread is at %s:%d, others wait at %s:%d", here.file, here.line, met.here.file,
             met.here.line);
    met.waiting.push_back(current);
    if (int(met.arrived.size()) < count) return wait(Status::kAtBarrier);
    let_go(met);
}

void arrive_some(int barrier, int count, Here here) {
    NumberedBarrier& met = join(barrier, count, here);
    if (int(met.arrived.size()) == count) return let_go(met);
    yield_to_ready();
}

void fence_stores() { on_proxy_fence(); }

void copy_box(void* shared, const TensorMap& map, int row, int column, unsigned long long* barrier, Here here) {
    State& state = state_of(barrier, "copy of a box", here);
    const void* site = __builtin_return_address(0);
    Box box{map, static_cast<unsigned char*>(shared), row, column, number_of(barrier), {}, here};
    check_box(box);
    check_fenced(state.start, "copy of a box: the barrier was initialised", site);
    for (int i = 0; i < map.box_rows; ++i) {
        const long long at = row + i, columns = std::min<long long>(map.box_columns, map.columns - column);
        if (at < 0 || at >= map.rows || column < 0 || columns <= 0) continue;
        check_access_of(*current, map.base + at * map.row_bytes + column * kElementBytes,
                        size_t(columns * kElementBytes), Access::kRead, site);
    }
    box.moment = moment_of_copy(state.number, ++state.num_boxes);
    box_begins(shared, size_t(map.box_rows) * kRowBytes, box.moment, site);
    boxes.push_back(box);
    if (order == Order::kReverse) land_at(boxes.size() - 1);
    yield_to_ready();
}

}  // namespace cusim

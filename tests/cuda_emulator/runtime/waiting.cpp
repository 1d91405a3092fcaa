// Block barriers, and calls in which the lanes of a warp meet. The last thread to arrive does the work for all.

#include "waiting.h"

#include <algorithm>

#include "checker.h"
#include "matrix.h"
#include "scheduler.h"

namespace cusim {
namespace {

struct Barrier {
    int num_waiting = 0;
    Here here{};
    bool any = false, all = true;
    int count = 0;
};

Barrier barrier;

// The lanes of a warp that wait in a warp call.
struct WarpMeeting {
    unsigned lanes = 0;  // a mask
    WarpCall call{};     // of the first of them, as is the next member
    unsigned mask = 0;
    bool agrees = true;  // whether the others made the same call
};

std::vector<WarpMeeting> warp_meetings;  // per warp

int result_of(const Barrier& met, Vote vote) {
    return vote == Vote::kOr ? met.any : vote == Vote::kAnd ? met.all : met.count;
}

// The lanes of a warp: 32, or fewer in the block's last one.
struct Warp {
    Thread* lanes;
    int num_lanes;

    explicit Warp(int warp)
        : lanes(&threads[size_t(warp) * 32]), num_lanes(std::min(32, int(threads.size()) - warp * 32)) {}
    unsigned all() const { return num_lanes == 32 ? ~0u : (1u << num_lanes) - 1; }
    // mask has no lane that the warp lacks.
    template <class F> void each(unsigned mask, const F& visit) const {
        for (unsigned left = mask; left; left &= left - 1) visit(lanes[__builtin_ctz(left)]);
    }
};

void check_same_call(const Warp& warp, unsigned mask) {
    const Thread& me = *current;
    warp.each(mask, [&](const Thread& lane) {
        if (lane.call == me.call && lane.mask == me.mask) return;
        fail("mismatched warp calls: lane %d is at %s:%d with mask %08x, lane %d at %s:%d with mask %08x", me.lane,
             me.here.file, me.here.line, me.mask, lane.lane, lane.here.file, lane.here.line, lane.mask);
    });
}

void shuffle(const Warp& warp, unsigned mask) {
    warp.each(mask, [&](Thread& lane) {
        if (!(mask >> lane.from_lane & 1)) {
            fail("bad shuffle mask at %s:%d: lane %d reads lane %d, which is not in mask %08x", lane.here.file,
                 lane.here.line, lane.lane, lane.from_lane, mask);
        }
        lane.result = warp.lanes[lane.from_lane].value;
    });
}

unsigned ballot(const Warp& warp, unsigned mask) {
    unsigned votes = 0;
    warp.each(mask, [&](const Thread& lane) { votes |= unsigned(lane.value != 0) << lane.lane; });
    return votes;
}

unsigned matching(const Warp& warp, unsigned mask, uint64_t value) {
    unsigned lanes = 0;
    warp.each(mask, [&](const Thread& lane) { lanes |= unsigned(lane.value == value) << lane.lane; });
    return lanes;
}

uint64_t combine(WarpCall call, uint64_t a, uint64_t b) {
    switch (call) {
        case WarpCall::kAdd: return a + b;
        case WarpCall::kMin: return uint64_t(std::min(int64_t(a), int64_t(b)));
        case WarpCall::kMax: return uint64_t(std::max(int64_t(a), int64_t(b)));
        case WarpCall::kAnd: return a & b;
        case WarpCall::kOr: return a | b;
        default: return a ^ b;
    }
}

uint64_t reduce(const Warp& warp, unsigned mask, WarpCall call) {
    bool first = true;
    uint64_t total = 0;
    warp.each(mask, [&](const Thread& lane) {
        total = first ? lane.value : combine(call, total, lane.value);
        first = false;
    });
    return total;
}

void give_all(const Warp& warp, unsigned mask, uint64_t result) {
    warp.each(mask, [&](Thread& lane) { lane.result = result; });
}

void perform(const Warp& warp, unsigned mask) {
    const Thread& me = *current;
    switch (me.call) {
        case WarpCall::kShuffle: return shuffle(warp, mask);
        case WarpCall::kBallot: return give_all(warp, mask, ballot(warp, mask));
        case WarpCall::kAny: return give_all(warp, mask, ballot(warp, mask) != 0);
        case WarpCall::kAll: return give_all(warp, mask, ballot(warp, mask) == mask);
        case WarpCall::kMatch:
            return warp.each(mask, [&](Thread& lane) { lane.result = matching(warp, mask, lane.value); });
        case WarpCall::kSync: return on_warp_barrier(me.warp, mask);
        case WarpCall::kMma: return multiply(warp.lanes);
        case WarpCall::kLdmatrix: return load_matrices(warp.lanes);
        default: return give_all(warp, mask, reduce(warp, mask, me.call));
    }
}

void wake(const Warp& warp, unsigned mask) {
    if (order != Order::kReverse) return warp.each(mask, make_ready);
    for (unsigned left = mask; left;) {
        const int lane = 31 - __builtin_clz(left);
        left &= ~(1u << lane);
        make_ready(warp.lanes[lane]);
    }
}

}  // namespace

void reset_waiting() {
    barrier = {};
    warp_meetings.assign((threads.size() + 31) / 32, {});
}

int block_barrier(Vote vote, bool predicate, Here here) {
    current->here = here;
    if (num_alive != int(threads.size())) {
        fail("barrier at %s:%d after %d threads of the block have ended", here.file, here.line,
             int(threads.size()) - num_alive);
    }
    if (barrier.num_waiting == 0) barrier = {0, here};
    if (barrier.here.line != here.line || barrier.here.file != here.file) {
        fail("divergent barrier: this thread is at %s:%d, others wait at %s:%d", here.file, here.line,
             barrier.here.file, barrier.here.line);
    }
    barrier.any |= predicate;
    barrier.all &= predicate;
    barrier.count += predicate;
    if (++barrier.num_waiting < num_alive) {
        wait(Status::kAtBarrier);
        return int(current->result);
    }
    const int result = result_of(barrier, vote);
    barrier = {};
    on_block_barrier();
    for (int i = 0; i < num_alive; ++i) {
        Thread& thread = threads[size_t(order == Order::kReverse ? num_alive - 1 - i : i)];
        thread.result = uint64_t(result);
        if (&thread != current) make_ready(thread);
    }
    yield_to_ready();
    return result;
}

void check_exit_leaves_no_barrier() {
    if (barrier.num_waiting == 0) return;
    fail("this thread ends while %d others wait for it at the barrier %s:%d", barrier.num_waiting, barrier.here.file,
         barrier.here.line);
}

uint64_t warp_call(WarpCall call, unsigned mask, uint64_t value, int from_lane, Here here) {
    Thread& me = *current;
    me.here = here;
    me.call = call;
    me.mask = mask;
    me.value = value;
    me.from_lane = int16_t(from_lane);
    if (!(mask >> me.lane & 1)) {
        fail("bad warp mask at %s:%d: lane %d calls, but is not in mask %08x", here.file, here.line, me.lane, mask);
    }
    const Warp warp(me.warp);
    const unsigned expected = mask & warp.all();
    WarpMeeting& met = warp_meetings[size_t(me.warp)];
    if (!met.lanes) met = {0, call, mask, true};
    met.agrees &= met.call == call && met.mask == mask;
    met.lanes |= 1u << me.lane;
    if ((met.lanes & expected) != expected) {
        wait(Status::kInWarpCall);
        return me.result;
    }
    if (!met.agrees) check_same_call(warp, expected);
    met.lanes &= ~expected;
    perform(warp, expected);
    wake(warp, expected & ~(1u << me.lane));
    yield_to_ready();
    return me.result;
}

}  // namespace cusim

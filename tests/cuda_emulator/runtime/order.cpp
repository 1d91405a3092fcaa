#include "order.h"

#include <string.h>

#include <algorithm>
#include <unordered_map>

namespace cusim {
namespace {

// The knowledge of a thread at a fence, which the next atomic publishes: its warp's clocks, and the releases it had
// seen.
struct Release {
    Moment moment;
    uint32_t clocks[32];
    std::vector<uint32_t> beyond;  // of all warps
    std::vector<int> known;
};

struct ThreadOrder {
    uint32_t clocks[32];       // per lane of its warp: the lane's accesses up to this clock happened before
    std::vector<int> known;    // releases it has seen, in ascending order
    std::vector<int> read;     // releases read by its atomics since its last fence
    bool fenced = false;
    Release fence;
    Clocks beyond;                     // of all warps and copies, through barriers in shared memory
    std::vector<Moment> proxy_fences;  // of this block, in order
};

constexpr int kFirstCopy = 1 << 20;  // the thread in moments of copies: this plus the barrier's number
constexpr uint32_t kNoEpoch = ~0u;   // of copies: barriers of the block do not order them

bool any_beyond = false;  // whether any thread of this block has waited for a barrier in shared memory

void unite(std::vector<uint32_t>& into, const std::vector<uint32_t>& more) {
    if (into.size() < more.size()) into.resize(more.size());
    for (size_t i = 0; i < more.size(); ++i) into[i] = std::max(into[i], more[i]);
}

void unite(Clocks& into, const Clocks& more) {
    unite(into.threads, more.threads);
    unite(into.copies, more.copies);
}

bool has(const std::vector<uint32_t>& clocks, int place, uint32_t clock) {
    return size_t(place) < clocks.size() && clocks[size_t(place)] >= clock;
}

uint32_t block = 0, first_block = 1, epoch = 0;
bool any_known = false;  // whether any thread of this block has seen a release
std::vector<ThreadOrder> orders;
std::vector<Release> releases;
std::unordered_map<uintptr_t, std::vector<int>> published;  // releases per atomically accessed address

void unite(std::vector<int>& into, const std::vector<int>& more) {
    if (more.empty()) return;
    std::vector<int> all;
    std::set_union(into.begin(), into.end(), more.begin(), more.end(), std::back_inserter(all));
    into.swap(all);
}

bool seen_by_release(const Moment& earlier, const Release& release) {
    if (earlier.block != release.moment.block) return false;
    if (earlier.epoch < release.moment.epoch || has(release.beyond, earlier.thread, earlier.clock)) return true;
    if (earlier.epoch > release.moment.epoch || earlier.thread / 32 != release.moment.thread / 32) return false;
    return release.clocks[earlier.thread % 32] >= earlier.clock;
}

}  // namespace

void begin_ordered_launch() {
    first_block = block + 1;
    releases.clear();
    published.clear();
}

void begin_ordered_block(int num_threads) {
    ++block;
    epoch = 0;
    any_known = any_beyond = false;
    orders.resize(size_t(num_threads));
    for (int i = 0; i < num_threads; ++i) {
        ThreadOrder& order = orders[size_t(i)];
        memset(order.clocks, 0, sizeof order.clocks);
        order.clocks[i % 32] = 1;
        order.known.clear();
        order.read.clear();
        order.fenced = false;
        order.beyond = {};
        order.proxy_fences.clear();
    }
}

uint32_t current_block() { return block; }

Moment now(int thread) { return {block, epoch, orders[size_t(thread)].clocks[thread % 32], thread}; }

Moment moment_of_atomic(int thread) {
    const ThreadOrder& order = orders[size_t(thread)];
    return order.fenced ? order.fence.moment : now(thread);
}

bool in_this_launch(const Moment& moment) { return moment.block >= first_block; }

bool ordered_before(const Moment& earlier, int thread) {
    const ThreadOrder& order = orders[size_t(thread)];
    if (earlier.block != block) {
        const auto saw = [&](int release) { return seen_by_release(earlier, releases[size_t(release)]); };
        return std::any_of(order.known.begin(), order.known.end(), saw);
    }
    if (earlier.thread >= kFirstCopy) return has(order.beyond.copies, earlier.thread - kFirstCopy, earlier.clock);
    if (earlier.thread == thread || earlier.epoch < epoch) return true;
    if (has(order.beyond.threads, earlier.thread, earlier.clock)) return true;
    return earlier.thread / 32 == thread / 32 && order.clocks[earlier.thread % 32] >= earlier.clock;
}

Moment moment_of_copy(int barrier, uint32_t clock) { return {block, kNoEpoch, clock, kFirstCopy + barrier}; }

void note_copy(Clocks& clocks, const Moment& copy) {
    const size_t place = size_t(copy.thread - kFirstCopy);
    if (clocks.copies.size() <= place) clocks.copies.resize(place + 1);
    clocks.copies[place] = std::max(clocks.copies[place], copy.clock);
}

void order_release(int thread, Clocks& into) {
    ThreadOrder& order = orders[size_t(thread)];
    unite(into, order.beyond);
    unite(into.known, order.known);
    into.threads.resize(std::max(into.threads.size(), orders.size()));
    const int first = thread / 32 * 32;
    for (int i = 0; i < 32 && first + i < int(orders.size()); ++i) {
        uint32_t& clock = into.threads[size_t(first + i)];
        clock = std::max(clock, order.clocks[i]);
    }
    ++order.clocks[thread % 32];  // the arrival does not order later accesses
}

void order_acquire(int thread, const Clocks& from) {
    unite(orders[size_t(thread)].beyond, from);
    unite(orders[size_t(thread)].known, from.known);
    any_beyond = true;
}

void order_proxy_fence(int thread) {
    ThreadOrder& order = orders[size_t(thread)];
    order.proxy_fences.push_back(now(thread));
    ++order.clocks[thread % 32];
}

bool proxy_fenced(const Moment& earlier, int thread) {
    for (const Moment& fence : orders[size_t(earlier.thread)].proxy_fences) {
        const bool is_same_epoch = fence.epoch == earlier.epoch;
        const bool follows = is_same_epoch ? fence.clock >= earlier.clock : fence.epoch > earlier.epoch;
        if (follows) return ordered_before(fence, thread);
    }
    return false;
}

void order_block() {
    ++epoch;
    if (any_beyond) {
        Clocks all;
        for (const ThreadOrder& order : orders) unite(all, order.beyond);
        for (ThreadOrder& order : orders) order.beyond = all;
    }
    if (!any_known) return;
    std::vector<int> all;
    for (const ThreadOrder& order : orders) unite(all, order.known);
    for (ThreadOrder& order : orders) order.known = all;
}

void order_warp(int warp, unsigned mask) {
    uint32_t latest[32] = {};
    std::vector<int> known;
    Clocks beyond;
    const auto each = [&](const auto& visit) {
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) visit(lane, orders[size_t(warp) * 32 + size_t(lane)]);
    };
    each([&](int, const ThreadOrder& order) {
        for (int i = 0; i < 32; ++i) latest[i] = std::max(latest[i], order.clocks[i]);
        if (any_known) unite(known, order.known);
        if (any_beyond) unite(beyond, order.beyond);
    });
    each([&](int lane, ThreadOrder& order) {
        memcpy(order.clocks, latest, sizeof latest);
        ++order.clocks[lane];
        if (any_known) order.known = known;
        if (any_beyond) order.beyond = beyond;
    });
}

void order_fence(int thread) {
    ThreadOrder& order = orders[size_t(thread)];
    if (!order.read.empty()) {
        unite(order.known, order.read);
        for (const int release : order.read) unite(order.known, releases[size_t(release)].known);
        order.read.clear();
        any_known = true;
    }
    order.fenced = true;
    order.fence.moment = now(thread);
    memcpy(order.fence.clocks, order.clocks, sizeof order.clocks);
    order.fence.beyond = order.beyond.threads;
    order.fence.known = order.known;
    ++order.clocks[thread % 32];  // the fence does not publish later accesses
}

void order_atomic(int thread, uintptr_t address) {
    ThreadOrder& order = orders[size_t(thread)];
    std::vector<int>& here = published[address];
    unite(order.read, here);
    if (!order.fenced) return;
    here.push_back(int(releases.size()));
    releases.push_back(order.fence);
}

}  // namespace cusim

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
    std::vector<int> known;
};

struct ThreadOrder {
    uint32_t clocks[32];       // per lane of its warp: the lane's accesses up to this clock happened before
    std::vector<int> known;    // releases it has seen, in ascending order
    std::vector<int> read;     // releases read by its atomics since its last fence
    bool fenced = false;
    Release fence;
};

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
    if (earlier.epoch < release.moment.epoch) return true;
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
    any_known = false;
    orders.resize(size_t(num_threads));
    for (int i = 0; i < num_threads; ++i) {
        ThreadOrder& order = orders[size_t(i)];
        memset(order.clocks, 0, sizeof order.clocks);
        order.clocks[i % 32] = 1;
        order.known.clear();
        order.read.clear();
        order.fenced = false;
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
    if (earlier.thread == thread || earlier.epoch < epoch) return true;
    return earlier.thread / 32 == thread / 32 && order.clocks[earlier.thread % 32] >= earlier.clock;
}

void order_block() {
    ++epoch;
    if (!any_known) return;
    std::vector<int> all;
    for (const ThreadOrder& order : orders) unite(all, order.known);
    for (ThreadOrder& order : orders) order.known = all;
}

void order_warp(int warp, unsigned mask) {
    uint32_t latest[32] = {};
    std::vector<int> known;
    const auto each = [&](const auto& visit) {
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) visit(lane, orders[size_t(warp) * 32 + size_t(lane)]);
    };
    each([&](int, const ThreadOrder& order) {
        for (int i = 0; i < 32; ++i) latest[i] = std::max(latest[i], order.clocks[i]);
        if (any_known) unite(known, order.known);
    });
    each([&](int lane, ThreadOrder& order) {
        memcpy(order.clocks, latest, sizeof latest);
        ++order.clocks[lane];
        if (any_known) order.known = known;
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

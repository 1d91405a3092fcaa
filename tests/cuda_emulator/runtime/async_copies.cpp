// A copy lands at the latest allowed moment, when its thread waits for it; in the reverse order it lands at the
// earliest one, at once. The first shows a missing wait, the second a buffer that is still being read.

#include "async_copies.h"

#include <string.h>

#include "checker.h"
#include "scheduler.h"

namespace cusim {
namespace {

struct Copy {
    void* target;
    const void* source;
    int bytes, source_bytes;
    Here here;
};

// The copies of one thread: its groups in order, then the copies that are in no group yet.
struct Pipeline {
    std::vector<Copy> copies;
    std::vector<size_t> group_ends;
    size_t num_landed = 0, num_groups_landed = 0;

    void clear() {
        copies.clear();
        group_ends.clear();
        num_landed = num_groups_landed = 0;
    }
};

std::vector<Pipeline> pipelines;
bool copies_in_use = false;  // by threads of this block

void land(const Copy& copy) {
    memcpy(copy.target, copy.source, size_t(copy.source_bytes));
    memset(static_cast<char*>(copy.target) + copy.source_bytes, 0, size_t(copy.bytes - copy.source_bytes));
}

}  // namespace

void reset_copies() {
    if (pipelines.size() < threads.size()) pipelines.resize(threads.size());
    if (!copies_in_use) return;
    copies_in_use = false;
    for (Pipeline& pipeline : pipelines) pipeline.clear();
}

void async_copy(void* shared, const void* source, int bytes, int source_bytes, Here here) {
    current->here = here;
    if (source_bytes < 0 || source_bytes > bytes) {
        fail("cp.async of %d bytes at %s:%d is to read %d", bytes, here.file, here.line, source_bytes);
    }
    check_shared(shared, size_t(bytes), size_t(bytes), "cp.async");
    if (reinterpret_cast<uintptr_t>(source) % size_t(bytes))
        fail("misaligned cp.async at %s:%d: its source is not at a multiple of %d", here.file, here.line, bytes);
    const void* site = __builtin_return_address(0);
    if (source_bytes > 0) check_access_of(*current, source, size_t(source_bytes), Access::kRead, site);
    check_access_of(*current, shared, size_t(bytes), Access::kCopyBegins, site);
    const Copy copy{shared, source, bytes, source_bytes, here};
    if (order == Order::kReverse) land(copy);
    copies_in_use = true;
    pipelines[size_t(current->number)].copies.push_back(copy);
}

void async_commit() {
    copies_in_use = true;
    Pipeline& mine = pipelines[size_t(current->number)];
    mine.group_ends.push_back(mine.copies.size());
}

void async_wait(int allowed_groups) {
    Pipeline& mine = pipelines[size_t(current->number)];
    const void* site = __builtin_return_address(0);
    while (mine.group_ends.size() - mine.num_groups_landed > size_t(allowed_groups)) {
        const size_t end = mine.group_ends[mine.num_groups_landed++];
        for (; mine.num_landed < end; ++mine.num_landed) {
            const Copy& copy = mine.copies[mine.num_landed];
            check_access_of(*current, copy.target, size_t(copy.bytes), Access::kCopyLands, site);
            if (order != Order::kReverse) land(copy);
        }
    }
    if (mine.num_landed == mine.copies.size()) mine.clear();
}

void check_copies_awaited() {
    if (!copies_in_use) return;
    const Pipeline& mine = pipelines[size_t(current->number)];
    if (mine.num_landed == mine.copies.size()) return;
    const Here here = mine.copies.back().here;
    fail("cp.async not awaited: this thread ends with %zu copies under way, the last begun at %s:%d",
         mine.copies.size() - mine.num_landed, here.file, here.line);
}

}  // namespace cusim

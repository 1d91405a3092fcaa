#include "dependent_launch.h"

#include "scheduler.h"

namespace cusim {
namespace {

struct Range {
    uintptr_t begin, end;
};

bool dependent = false;
// What launches since the last one that was not dependent may write: none of them need have ended.
std::vector<Range> written;

}  // namespace

void begin_dependent_launch(bool is_dependent) {
    dependent = is_dependent;
    if (!dependent) written.clear();
}

void end_dependent_launch(const std::vector<Region>& regions) {
    for (const Region& region : regions)
        if (region.sort == Sort::kBuffer) written.push_back({region.begin, region.end});
}

void wait_for_earlier_kernels() { current->has_waited = true; }

void check_before_wait(uintptr_t address, size_t bytes, bool is_read, uint32_t site, const char* name) {
    if (!dependent) return;
    if (!is_read) fail("write at @%x@ to %s before the wait for earlier kernels, which may still use it", site, name);
    for (const Range& range : written)
        if (address < range.end && range.begin < address + bytes)
            fail("read at @%x@ of %s before the wait for earlier kernels, which may still write it", site, name);
}

void check_waited() {
    if (dependent && !current->has_waited) fail("this thread ends without a wait for earlier kernels");
}

}  // namespace cusim

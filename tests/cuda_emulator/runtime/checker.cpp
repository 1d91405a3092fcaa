// Checks each byte for bounds, alignment, races, and reads of shared memory before it is written.

#include "checker.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "dependent_launch.h"
#include "order.h"
#include "scheduler.h"

namespace cusim {
namespace {

struct Record {
    Moment moment;
    uint32_t site;  // as an offset in the library's image
    bool atomic, under_way;
    bool is_box;  // written by a copy of a box
};

// The known accesses to one byte.
struct Cell {
    Record write, read;
    uint32_t more_reads;  // 1 + index in read_lists, if several threads have read since the write
    uint32_t launch;      // the launch for which more_reads is valid
};

constexpr uintptr_t kPageBytes = 4096;
struct ShadowPage {
    Cell cells[kPageBytes];
};

bool enabled = false;
uint32_t launch = 0;
Memory memory;
const Region* last_region;
std::unordered_map<uintptr_t, ShadowPage*> pages;  // of this launch
// All pages ever needed at once; the first pages.size() are in use. A record tells whether it is of this launch, so a
// page needs no clearing before it serves another address.
std::vector<std::unique_ptr<ShadowPage>> kept_pages;
uintptr_t last_page_number;
ShadowPage* last_page;
std::vector<std::vector<Record>> read_lists;
size_t num_read_lists;

bool within(uintptr_t address, size_t bytes, uintptr_t begin, uintptr_t end) {
    return address >= begin && address + bytes <= end;
}

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

const Region* find_region(uintptr_t address, size_t bytes) {
    if (last_region && within(address, bytes, last_region->begin, last_region->end)) return last_region;
    for (const Region& region : memory.regions)
        if (within(address, bytes, region.begin, region.end)) return last_region = &region;
    return nullptr;
}

// Errors contain the sites of accesses as @offset@; launcher.py replaces them with source lines.
uint32_t site_of(const void* address) { return uint32_t(number(address) - 1 - number(memory.module.image)); }

[[noreturn]] void fail_out_of_bounds(uintptr_t address, size_t bytes, const char* verb, uint32_t site) {
    const Region* nearest = nullptr;
    uintptr_t nearest_distance = ~uintptr_t(0);
    for (const Region& region : memory.regions) {
        const uintptr_t begin = region.begin, end = region.end;
        const uintptr_t distance = address < begin ? begin - address : address >= end ? address - end : 0;
        if (begin == end || distance >= nearest_distance) continue;
        nearest = &region;
        nearest_distance = distance;
    }
    if (!nearest) fail("out-of-bounds %s of %zu bytes at @%x@", verb, bytes, site);
    fail("out-of-bounds %s of %zu bytes at @%x@: at byte %lld of %s, which has %llu", verb, bytes, site,
         (long long)(address - nearest->begin), nearest->name.c_str(),
         (unsigned long long)(nearest->end - nearest->begin));
}

Cell* cells_of_page(uintptr_t page_number) {
    if (page_number == last_page_number && last_page) return last_page->cells;
    ShadowPage*& page = pages[page_number];
    if (!page) {
        if (pages.size() > kept_pages.size()) kept_pages.push_back(std::make_unique<ShadowPage>());
        page = kept_pages[pages.size() - 1].get();
    }
    last_page_number = page_number;
    last_page = page;
    return page->cells;
}

class Check {
  public:
    Check(const Thread& thread, Access access, const Region& region, const void* site)
        : thread_(thread.number), access_(access), region_(region),
          mine_{access == Access::kAtomic ? moment_of_atomic(thread.number) : now(thread.number), site_of(site),
                access == Access::kAtomic, access == Access::kCopyBegins, false} {}
    // A copy of a box.
    Check(const Thread& thread, Access access, const Region& region, const void* site, const Moment& moment)
        : thread_(thread.number), access_(access), region_(region), mine_{moment, site_of(site), false, true, true} {}

    void byte(uintptr_t address) {
        address_ = address;
        Cell& cell = cells_of_page(address / kPageBytes)[address % kPageBytes];
        if (access_ == Access::kBoxLands) {
            const Moment& written = cell.write.moment;
            const bool is_same = written.thread == mine_.moment.thread && written.clock == mine_.moment.clock;
            if (is_same) cell.write.under_way = false;
            return;
        }
        if (valid(cell.write)) against_write(cell.write);
        else if (region_.sort == Sort::kShared && reads())
            fail("uninitialised: read at @%x@ of byte %llu of %s, which this block has not written yet",
                 mine_.site, offset(), region_.name.c_str());
        if (reads()) return remember_read(cell);
        if (valid(cell.read)) against_read(cell.read, "write after read");
        if (has_more_reads(cell))
            for (const Record& read : read_lists[cell.more_reads - 1])
                if (valid(read)) against_read(read, "write after read");
        cell.write = mine_;
        cell.read.moment.block = 0;
        cell.more_reads = 0;
    }

  private:
    bool reads() const { return access_ == Access::kRead || access_ == Access::kProductReads; }

    // Records of shared memory are valid in their own block only, because each block has new shared memory.
    bool valid(const Record& record) const {
        if (region_.sort == Sort::kShared) return record.moment.block == current_block();
        return in_this_launch(record.moment);
    }

    bool has_more_reads(const Cell& cell) const { return cell.more_reads && cell.launch == launch; }

    unsigned long long offset() const { return address_ - region_.begin; }

    void against_write(const Record& write) const {
        if (write.under_way && write.is_box)
            fail("copy of a box not awaited: access at @%x@ to byte %llu of %s, which the copy begun at @%x@ may still "
                 "be writing", mine_.site, offset(), region_.name.c_str(), write.site);
        if (write.under_way && access_ != Access::kCopyLands)
            fail("cp.async not awaited: access at @%x@ to byte %llu of %s, which the copy of thread %d, begun at @%x@, "
                 "may still be writing",
                 mine_.site, offset(), region_.name.c_str(), write.moment.thread, write.site);
        against(write, reads() ? "read after write" : "write after write");
        const bool is_async = access_ == Access::kProductReads || access_ == Access::kBoxBegins;
        if (is_async && !write.is_box && !proxy_fenced(write.moment, thread_))
            fail("missing fence: asynchronous access at @%x@ to byte %llu of %s, which thread %d stored at @%x@ "
                 "without a fence.proxy.async before the barrier", mine_.site, offset(), region_.name.c_str(),
                 write.moment.thread, write.site);
    }

    void against_read(const Record& read, const char* kind) const { against(read, kind); }

    void against(const Record& other, const char* kind) const {
        if ((other.atomic && mine_.atomic) || ordered_before(other.moment, thread_)) return;
        const bool here = other.moment.block == current_block();
        if (other.is_box)
            fail("race (%s) at @%x@ on byte %llu of %s: nothing orders this after the copy of a box, begun at @%x@",
                 kind, mine_.site, offset(), region_.name.c_str(), other.site);
        fail("race (%s) at @%x@ on byte %llu of %s: thread %d of %s block was at @%x@, and nothing orders the two",
             kind, mine_.site, offset(), region_.name.c_str(), other.moment.thread, here ? "this" : "another",
             other.site);
    }

    // Keep only reads that are not ordered before another kept read: a write ordered after that one is ordered after
    // them too.
    void remember_read(Cell& cell) {
        const bool replaces = !valid(cell.read) || cell.read.moment.thread == thread_ ||
                              ordered_before(cell.read.moment, thread_);
        if (replaces && !has_more_reads(cell)) {
            cell.read = mine_;
            return;
        }
        if (!has_more_reads(cell)) {
            if (num_read_lists == read_lists.size()) read_lists.emplace_back();
            read_lists[num_read_lists].clear();
            cell.more_reads = uint32_t(++num_read_lists);
            cell.launch = launch;
        }
        std::vector<Record>& reads = read_lists[cell.more_reads - 1];
        for (Record& read : reads) {
            if (valid(read) && !ordered_before(read.moment, thread_)) continue;
            read = mine_;
            return;
        }
        reads.push_back(mine_);
    }

    const int thread_;
    const Access access_;
    const Region& region_;
    const Record mine_;
    uintptr_t address_ = 0;  // of the checked byte
};

}  // namespace

void begin_checked_launch(const Memory& its_memory, bool checked) {
    enabled = checked;
    memory = its_memory;
    last_region = nullptr;
    if (!enabled) return;
    ++launch;
    num_read_lists = 0;
    pages.clear();
    last_page = nullptr;
    begin_ordered_launch();
}

void begin_checked_block() {
    if (enabled) begin_ordered_block(int(threads.size()));
}

void check_access(const void* address, size_t bytes, Access access, const void* site) {
    if (!enabled || !current) return;
    const uintptr_t first = number(address);
    if (on_a_stack(first) || first - number(&machine) < sizeof machine) return;
    check_access_of(*current, address, bytes, access, site);
}

void check_access_of(Thread& thread, const void* address, size_t bytes, Access access, const void* site) {
    if (!enabled) return;
    const uintptr_t first = number(address);
    const Region* region = find_region(first, bytes);
    const bool reads = access == Access::kRead || access == Access::kProductReads;
    const char* verb = reads ? "read" : "write";
    if (region && region->sort != Sort::kShared && !thread.has_waited)
        check_before_wait(first, bytes, reads, site_of(site), region->name.c_str());
    if (!region) {
        const bool constant = within(first, bytes, number(memory.module.image), number(memory.module.image_end)) &&
                              !within(first, 1, number(memory.module.shared), number(memory.module.shared_end));
        if (constant && reads) return;
        fail_out_of_bounds(first, bytes, verb, site_of(site));
    }
    if (bytes <= 16 && (bytes & (bytes - 1)) == 0 && first % bytes)
        fail("misaligned %s of %zu bytes at @%x@: at byte %llu of %s", verb, bytes, site_of(site),
             (unsigned long long)(first - region->begin), region->name.c_str());
    if (region->sort == Sort::kReadOnlyBuffer) {
        if (reads) return;
        fail("write at @%x@ to %s, which the kernel takes as const", site_of(site), region->name.c_str());
    }
    Check check(thread, access, *region, site);
    for (uintptr_t byte = first; byte < first + bytes; ++byte) check.byte(byte);
}

void check_shared(const void* address, size_t bytes, size_t alignment, const char* instruction) {
    const uintptr_t first = number(address);
    const Here here = current->here;
    if (first % alignment) fail("misaligned %s at %s:%d: not at a multiple of %zu", instruction, here.file, here.line,
                                alignment);
    const Region* region = find_region(first, bytes);
    if (region && region->sort == Sort::kShared) return;
    fail("out-of-bounds %s at %s:%d: %zu bytes that are not all in one part of the block's shared memory", instruction,
         here.file, here.line, bytes);
}

void box_begins(const void* target, size_t bytes, const Moment& moment, const void* site) {
    if (!enabled) return;
    Check check(*current, Access::kBoxBegins, *find_region(number(target), bytes), site, moment);
    for (size_t i = 0; i < bytes; ++i) check.byte(number(target) + i);
}

void box_lands(const void* target, size_t bytes, const Moment& moment) {
    if (!enabled) return;
    Check check(threads[0], Access::kBoxLands, *find_region(number(target), bytes), nullptr, moment);
    for (size_t i = 0; i < bytes; ++i) check.byte(number(target) + i);
}

void check_fenced(const Moment& earlier, const char* what, const void* site) {
    if (enabled && !(ordered_before(earlier, current->number) && proxy_fenced(earlier, current->number)))
        fail("missing fence at @%x@: %s without a fence.proxy.async and a barrier after it", site_of(site), what);
}

Moment moment_now() { return enabled ? now(current->number) : Moment{}; }

void release_to(Clocks& clocks) {
    if (enabled) order_release(current->number, clocks);
}

void acquire_for(const Thread& thread, const Clocks& clocks) {
    if (enabled) order_acquire(thread.number, clocks);
}

void on_proxy_fence() {
    if (enabled) order_proxy_fence(current->number);
}

void on_block_barrier() {
    if (enabled) order_block();
}

void on_warp_barrier(int warp, unsigned mask) {
    if (enabled) order_warp(warp, mask);
}

void fence() {
    if (enabled) order_fence(current->number);
}

void before_atomic(const void* address, size_t bytes, const void* site) {
    check_access(address, bytes, Access::kAtomic, site);
    if (enabled) order_atomic(current->number, number(address));
}

}  // namespace cusim

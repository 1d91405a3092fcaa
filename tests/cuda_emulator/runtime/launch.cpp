// The functions that Python calls: one launch of one kernel.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xmmintrin.h>

#include <algorithm>

#include "async_copies.h"
#include "boxes.h"
#include "checker.h"
#include "dependent_launch.h"
#include "scheduler.h"
#include "waiting.h"
#include "warpgroup.h"

namespace cusim {

constexpr unsigned kSubnormalsAreZero = 0x8040;  // MXCSR bits: GPU builds use -ftz=true

// The layout of these two structures must match launcher.py.
struct Argument {
    void* value;
    int kind, bytes;  // of the value; kind is a Kind
    void* tensor;     // null for scalars; the next members are for tensors
    size_t tensor_bytes;
    int dtype_kind, dtype_bytes;  // of an element
};

struct Launch {
    unsigned grid[3];
    int num_threads;
    size_t shared_bytes;
    int num_arguments;
    const Argument* arguments;
    int check;
    int order;
    uint64_t seed;
    int is_dependent;  // begins before earlier kernels have ended
};

namespace {

constexpr size_t kMaxSharedBytes = 227 << 10;  // the maximum over all supported GPUs
constexpr size_t kSharedAlignment = 1024;
constexpr int kPoison = 0xff;  // every float of these bytes is a NaN

bool refuse(const char* format, int a, int b = 0, int c = 0) {
    char text[256];
    snprintf(text, sizeof text, format, a, b, c);
    error = text;
    return false;
}

bool fits(const Kernel& kernel, const Launch& launch) {
    if (launch.num_threads < 1 || launch.num_threads > 1024) return refuse("a block of %d threads", launch.num_threads);
    if (kernel.max_threads && launch.num_threads > kernel.max_threads)
        return refuse("a block of %d threads, but __launch_bounds__ allows %d", launch.num_threads, kernel.max_threads);
    if (launch.grid[0] > 0x7fffffffu || launch.grid[1] > 65535 || launch.grid[2] > 65535)
        return refuse("a grid beyond 2147483647 x 65535 x 65535", 0);
    if (launch.shared_bytes > kMaxSharedBytes)
        return refuse("%d bytes of shared memory, of which a GPU has %d at most", int(launch.shared_bytes),
                      int(kMaxSharedBytes));
    if (launch.num_arguments != kernel.num_parameters)
        return refuse("the kernel takes %d arguments, not %d", kernel.num_parameters, launch.num_arguments);
    return true;
}

const char* kind_name(int kind) {
    const char* names[] = {"pointer", "float", "integer", "structure"};
    return names[kind];
}

std::string parameter_name(const Kernel& kernel, int index) {
    const char* start = kernel.parameter_names;
    for (int i = 0; i < index; ++i) start = strchr(start, ',') + 1;
    return std::string(start, strcspn(start, ","));
}

bool arguments_match(const Kernel& kernel, const Launch& launch) {
    for (int i = 0; i < launch.num_arguments; ++i) {
        const Argument& given = launch.arguments[i];
        const Parameter& wanted = kernel.parameters[i];
        char text[256] = "";
        if (given.kind != int(wanted.kind) || given.bytes != wanted.bytes)
            snprintf(text, sizeof text, "a %s of %d bytes, given a %s of %d", kind_name(int(wanted.kind)), wanted.bytes,
                     kind_name(given.kind), given.bytes);
        const bool known = wanted.pointed_kind == Kind::kFloat || wanted.pointed_kind == Kind::kInteger;
        const bool bytes_alone = wanted.pointed_bytes <= 1 || given.dtype_bytes <= 1;
        if (given.tensor && known && !bytes_alone &&
            (given.dtype_kind != int(wanted.pointed_kind) || given.dtype_bytes != wanted.pointed_bytes))
            snprintf(text, sizeof text, "a pointer to a %s of %d bytes, given one to a %s of %d",
                     kind_name(int(wanted.pointed_kind)), wanted.pointed_bytes, kind_name(given.dtype_kind),
                     given.dtype_bytes);
        if (!*text) continue;
        error = "argument " + std::to_string(i) + " (" + parameter_name(kernel, i) + "): the kernel takes " + text;
        return false;
    }
    return true;
}

std::vector<Region> regions_of(const Kernel& kernel, const Launch& launch) {
    std::vector<Region> regions;
    const auto add = [&](const void* address, size_t bytes, Sort sort, const std::string& name) {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
        regions.push_back({begin, begin + bytes, sort, name});
    };
    for (int i = 0; i < launch.num_arguments; ++i) {
        const Argument& argument = launch.arguments[i];
        if (!argument.tensor) continue;
        const bool is_map = argument.kind == int(Kind::kOther);  // copies only read through it
        const Sort sort = is_map || kernel.parameters[i].read_only ? Sort::kReadOnlyBuffer : Sort::kBuffer;
        add(argument.tensor, argument.tensor_bytes, sort,
            "argument " + std::to_string(i) + " (" + parameter_name(kernel, i) + ")");
    }
    // An argument that is const may overlap one that is not, and then its bytes may change.
    for (Region& region : regions)
        for (const Region& other : regions)
            if (other.sort == Sort::kBuffer && other.begin < region.end && region.begin < other.end)
                region.sort = Sort::kBuffer;
    add(machine.dynamic_shared, launch.shared_bytes, Sort::kShared, "dynamic shared memory");
    const Module& module = kernel.module;
    for (const SharedVariable* variable = module.variables; variable != module.variables_end; ++variable)
        add(variable->address, variable->bytes, Sort::kShared, std::string("shared variable ") + variable->name);
    return regions;
}

std::vector<uint64_t> blocks_in_order(const Launch& launch) {
    std::vector<uint64_t> blocks(uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2]);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
    if (order == Order::kReverse) std::reverse(blocks.begin(), blocks.end());
    if (order == Order::kRandom)
        for (size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[random_number() % i]);
    return blocks;
}

}  // namespace
}  // namespace cusim

using namespace cusim;

extern "C" const char* cusim_error() { return error.c_str(); }

// Returns true if the launch ran to its end; otherwise cusim_error returns the reason.
extern "C" bool cusim_launch(const Kernel* kernel, const Launch* launch) {
    error.clear();
    if (!fits(*kernel, *launch) || !arguments_match(*kernel, *launch)) return false;

    const uint3 block_dim = {unsigned(launch->num_threads), 1, 1};
    prepare_threads(launch->num_threads, block_dim, Order(launch->order), launch->seed);
    machine.grid_dim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    const size_t allocated = (launch->shared_bytes / kSharedAlignment + 1) * kSharedAlignment;
    machine.dynamic_shared = static_cast<unsigned char*>(aligned_alloc(kSharedAlignment, allocated));
    const Module& module = kernel->module;
    const std::vector<Region> regions = regions_of(*kernel, *launch);
    begin_checked_launch({regions, module}, launch->check != 0);
    begin_dependent_launch(launch->is_dependent != 0);
    std::vector<void*> values;
    for (int i = 0; i < launch->num_arguments; ++i) values.push_back(launch->arguments[i].value);

    const unsigned callers_rounding = _mm_getcsr();
    _mm_setcsr(callers_rounding | kSubnormalsAreZero);
    for (const uint64_t number : blocks_in_order(*launch)) {
        const uint64_t x = launch->grid[0], y = launch->grid[1];
        machine.block_index = {unsigned(number % x), unsigned(number / x % y), unsigned(number / x / y)};
        memset(machine.dynamic_shared, kPoison, launch->shared_bytes);
        if (module.shared) memset(module.shared, kPoison, size_t(module.shared_end - module.shared));
        reset_waiting();
        reset_copies();
        reset_barriers();
        reset_products();
        begin_checked_block();
        run_block(*kernel, values.data());
        if (!error.empty()) break;
    }
    _mm_setcsr(callers_rounding);
    end_dependent_launch(regions);
    free(machine.dynamic_shared);
    return error.empty();
}

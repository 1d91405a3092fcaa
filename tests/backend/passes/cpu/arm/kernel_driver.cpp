// Loads a library of CPU kernels and calls its functions for the process at the other end of stdin and stdout. Tests run
// it under an emulator of another CPU.
//
//   request           followed by              answer
//   allocate, size                             the address, 8 bytes
//   free, address
//   write, address    size, the bytes
//   read, address     size                     the bytes
//   call, n           n arguments, 32 bytes    the result, 8 bytes
//                     of the function's name
//   call_float, n     the same                 the result, a float
//
// All other numbers are int64 in the byte order of x86-64 and of Linux on ARM. An address and a size must be within one
// allocation; a pointer within an argument is not checked. A wrong request ends the process with a message.

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

namespace {

using i64 = std::int64_t;

constexpr i64 kMaxBytes = i64(1) << 30;
constexpr i64 kMaxArguments = 10;
enum Operation : i64 { kAllocate, kFree, kWrite, kRead, kCall, kCallFloat };

[[noreturn]] void fail(const char* reason) {
    std::fprintf(stderr, "kernel driver: %s\n", reason);
    std::exit(2);
}

template <class T> T receive() {
    T value;
    if (std::fread(&value, sizeof value, 1, stdin) != 1) fail("the request is incomplete");
    return value;
}

void send(const void* bytes, i64 size) {
    if (std::fwrite(bytes, 1, size, stdout) != size_t(size) || std::fflush(stdout) != 0) fail("cannot answer");
}

// Each allocation ends where a page begins that cannot be accessed, so kernels that go beyond an array end the process.
class Memory {
  public:
    i64 allocate(i64 size) {
        if (size < 0 || size > kMaxBytes) fail("the size of an allocation is out of range");
        const i64 page = sysconf(_SC_PAGESIZE), usable = (size + page - 1) / page * page;
        void* mapping = mmap(nullptr, usable + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapping == MAP_FAILED) fail("there is no memory");
        char* end = static_cast<char*>(mapping) + usable;
        if (mprotect(end, page, PROT_NONE) != 0) fail("a page cannot be protected");
        const i64 address = reinterpret_cast<i64>(end) - size;
        blocks_[address] = {mapping, usable + page, size};
        return address;
    }

    void free(i64 address) {
        const auto found = blocks_.find(address);
        if (found == blocks_.end()) fail("the address to free is not allocated");
        munmap(found->second.mapping, found->second.mapped_bytes);
        blocks_.erase(found);
    }

    // The memory at [address, address + size).
    char* at(i64 address, i64 size) const {
        auto after = blocks_.upper_bound(address);
        if (after == blocks_.begin()) fail("the address is not allocated");
        const auto& [start, block] = *--after;
        if (size < 0 || address - start > block.size - size) fail("the access is not within one allocation");
        return reinterpret_cast<char*>(address);
    }

  private:
    struct Block {
        void* mapping;
        i64 mapped_bytes;
        i64 size;
    };
    std::map<i64, Block> blocks_;
};

// All parameters are integers or pointers, which are passed in registers or on the stack like int64; on both
// architectures a function ignores arguments that it does not have.
template <class Result> void call(void* library, i64 num_arguments) {
    if (num_arguments < 0 || num_arguments > kMaxArguments) fail("the number of arguments is out of range");
    i64 a[kMaxArguments] = {};
    for (i64 i = 0; i < num_arguments; ++i) a[i] = receive<i64>();
    struct Name {
        char text[32];
    } name = receive<Name>();
    name.text[sizeof name.text - 1] = 0;
    using Function = Result (*)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64);
    const auto function = reinterpret_cast<Function>(dlsym(library, name.text));
    if (!function) fail(dlerror());
    const Result result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
    send(&result, sizeof result);
}

void serve(void* library, Memory& memory, i64 operation, i64 operand) {
    switch (operation) {
        case kAllocate: {
            const i64 address = memory.allocate(operand);
            return send(&address, sizeof address);
        }
        case kFree: return memory.free(operand);
        case kWrite: {
            const i64 size = receive<i64>();
            if (std::fread(memory.at(operand, size), 1, size, stdin) != size_t(size)) fail("the bytes are incomplete");
            return;
        }
        case kRead: {
            const i64 size = receive<i64>();
            return send(memory.at(operand, size), size);
        }
        case kCall: return call<i64>(library, operand);
        case kCallFloat: return call<float>(library, operand);
        default: fail("there is no such operation");
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) fail("usage: kernel_driver LIBRARY");
    void* library = dlopen(argv[1], RTLD_NOW);
    if (!library) fail(dlerror());
    Memory memory;
    i64 operation;
    while (std::fread(&operation, sizeof operation, 1, stdin) == 1) serve(library, memory, operation, receive<i64>());
    return 0;
}

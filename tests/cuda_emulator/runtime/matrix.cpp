#include "matrix.h"

#include <string.h>

#include "checker.h"

namespace cusim {
namespace {

constexpr unsigned kWholeWarp = ~0u;

// One lane's operands; the warp call passes their address as its value.
struct Multiply {
    Number number;
    float* acc;
    const unsigned* a;
    unsigned b[2];
};

struct Load {
    unsigned* registers;
    bool transposed;
    const void* row;
    const void* site;
};

template <class T> T& handed_in(const Thread& lane) { return *reinterpret_cast<T*>(lane.value); }

void check_whole(const Thread* lanes, const char* instruction) {
    if (lanes + 32 <= threads.data() + threads.size()) return;
    fail("%s at %s:%d in a warp of fewer than 32 threads", instruction, lanes->here.file, lanes->here.line);
}

float to_float(Number number, unsigned pair, int index) {
    const uint16_t bits = uint16_t(pair >> 16 * index);
    return number == Number::kBf16 ? bf16_to_float(bits) : half_to_float(bits);
}

typedef float Row __attribute__((vector_size(32)));  // the 8 columns of b and acc

}  // namespace

float bf16_to_float(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

uint16_t float_to_half(float x) {
    const _Float16 half = _Float16(x);
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

float half_to_float(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return float(half);
}

void mma(Number number, float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Here here) {
    Multiply mine{number, acc, a, {b0, b1}};
    warp_call(WarpCall::kMma, kWholeWarp, reinterpret_cast<uint64_t>(&mine), 0, here);
}

void multiply(Thread* lanes) {
    check_whole(lanes, "mma");
    float a[16][16];
    Row b[16], acc[16];
    // Lane 4 g + t holds columns 2t and 2t + 1 of rows g and g + 8; of a, also columns 2t + 8 and 2t + 9.
    for (int lane = 0; lane < 32; ++lane) {
        const Multiply& mine = handed_in<Multiply>(lanes[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 2; ++i) {
            a[g][2 * t + i] = to_float(mine.number, mine.a[0], i);
            a[g + 8][2 * t + i] = to_float(mine.number, mine.a[1], i);
            a[g][2 * t + 8 + i] = to_float(mine.number, mine.a[2], i);
            a[g + 8][2 * t + 8 + i] = to_float(mine.number, mine.a[3], i);
            b[2 * t + i][g] = to_float(mine.number, mine.b[0], i);
            b[2 * t + 8 + i][g] = to_float(mine.number, mine.b[1], i);
            acc[g][2 * t + i] = mine.acc[i];
            acc[g + 8][2 * t + i] = mine.acc[2 + i];
        }
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k) acc[row] += a[row][k] * b[k];
    for (int lane = 0; lane < 32; ++lane) {
        float* mine = handed_in<Multiply>(lanes[lane]).acc;
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 2; ++i) {
            mine[i] = acc[g][2 * t + i];
            mine[2 + i] = acc[g + 8][2 * t + i];
        }
    }
}

void ldmatrix(unsigned (&registers)[4], bool transposed, const void* row, Here here) {
    Load mine{registers, transposed, row, __builtin_return_address(0)};
    warp_call(WarpCall::kLdmatrix, kWholeWarp, reinterpret_cast<uint64_t>(&mine), 0, here);
}

void load_matrices(Thread* lanes) {
    check_whole(lanes, "ldmatrix");
    const Load& any = handed_in<Load>(lanes[0]);
    for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t numbers[8][8];
        for (int row = 0; row < 8; ++row) {
            Thread& lane = lanes[matrix * 8 + row];
            const Load& its = handed_in<Load>(lane);
            check_shared(its.row, 16, 16, "ldmatrix");
            check_access_of(lane, its.row, 16, Access::kRead, its.site);
            memcpy(numbers[row], its.row, 16);
        }
        for (int lane = 0; lane < 32; ++lane) {
            const int row = lane / 4, column = lane % 4 * 2;
            const uint16_t low = any.transposed ? numbers[column][row] : numbers[row][column];
            const uint16_t high = any.transposed ? numbers[column + 1][row] : numbers[row][column + 1];
            handed_in<Load>(lanes[lane]).registers[matrix] = low | unsigned(high) << 16;
        }
    }
}

}  // namespace cusim

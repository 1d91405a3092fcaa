// mma.m16n8k16 and ldmatrix, executed for a whole warp once all its lanes have called.

#pragma once

#include "scheduler.h"

namespace cusim {

void multiply(Thread* lanes);
void load_matrices(Thread* lanes);

float bf16_to_float(uint16_t bits);

}  // namespace cusim

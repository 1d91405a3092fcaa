// Included before a kernel's source when it is compiled for the CPU (with -DCUSIM): the parts of CUDA C++ that our
// kernels use.

#pragma once

#include "runtime.h"

#include "language.h"

#include "maths.h"

#include "memory.h"

#include "warp.h"

#include "entry.h"

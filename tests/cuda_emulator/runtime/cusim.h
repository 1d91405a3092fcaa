// What a kernel's source is compiled with on the CPU: the parts of CUDA C++ that our kernels use. -DCUSIM is set.

#pragma once

#include "runtime.h"

#include "language.h"

#include "maths.h"

#include "memory.h"

#include "warp.h"

#include "entry.h"

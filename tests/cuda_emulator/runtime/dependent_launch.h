// Launches that begin before the kernels before them have ended. The emulator runs one kernel after the other, and checks
// that a kernel would do the same if it ran before them up to its wait: it reads nothing that they may write, and writes
// nothing.

#pragma once

#include <vector>

#include "checker.h"

namespace cusim {

void begin_dependent_launch(bool is_dependent);
void end_dependent_launch(const std::vector<Region>& regions);

// Check an access to global memory by a thread that has not waited. site: as in the checker's errors.
void check_before_wait(uintptr_t address, size_t bytes, bool is_read, uint32_t site, const char* name);
// Call when the current thread is about to end.
void check_waited();

}  // namespace cusim

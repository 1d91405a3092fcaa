// The parts of barriers and warp calls that the scheduler and the launcher call.

#pragma once

namespace cusim {

void reset_waiting();
// Call when the current thread has just ended.
void check_exit_leaves_no_barrier();

}  // namespace cusim

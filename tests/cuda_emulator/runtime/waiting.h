// Barriers and warp calls, as the scheduler needs them.

#pragma once

namespace cusim {

void reset_waiting();
// The current thread has just ended.
void check_exit_leaves_no_barrier();

}  // namespace cusim

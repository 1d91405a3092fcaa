// Barriers in shared memory, and copies of boxes in flight.

#pragma once

namespace cusim {

void reset_barriers();
// Let one copy in flight arrive. Returns false if there is none.
bool land_a_box();
// Call before another thread is chosen: in the random order a copy may arrive.
void maybe_land_a_box();
// Call when the block's last thread has ended.
void check_boxes_landed();

}  // namespace cusim

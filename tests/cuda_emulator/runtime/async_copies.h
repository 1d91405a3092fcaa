// cp.async: groups of copies in flight.

#pragma once

namespace cusim {

void reset_copies();
// Call when the current thread is about to end.
void check_copies_awaited();

}  // namespace cusim

// cp.async: groups of copies that are under way.

#pragma once

namespace cusim {

void reset_copies();
// The current thread is about to end.
void check_copies_awaited();

}  // namespace cusim

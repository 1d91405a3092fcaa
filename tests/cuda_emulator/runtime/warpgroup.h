// Matrix products of warpgroups in flight, and the registers that warpgroups have.

#pragma once

namespace cusim {

void reset_products();
// Call when the current thread is about to end.
void check_products_awaited();
// Call when the block's last thread has ended.
void check_registers();

}  // namespace cusim

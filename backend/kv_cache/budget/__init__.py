"""How much memory the KV cache gets, at start: `kv_plan` for a cache of pages, `whole_plan` for passes without one.

`memory` measures the device, and `budget_table` prints the plan. May import `kv_groups` and what `kv_cache` may.
"""

"""What happens before the backend serves: settings, checks and memory plans of a model, and its card for frontends.

`startup` prepares a model directory and the pass's settings, `pass_checks` checks the pass, `paging` makes the
scheduler of a pass with a KV cache, and `model_card` is what frontends receive. `standby` shortens a
restart, and `weight_watch` compares weights that outlive the process. `main` calls them in order.
"""

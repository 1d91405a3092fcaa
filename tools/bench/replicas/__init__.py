"""Measurements of several backends of the same model.

`failover` kills one of two real ones under load. `fleet` simulates up to a thousand (`fleet_simulation`) behind a
router (`fleet_routing`), with the simulated device of `components`.

It may import `components`, `harness`, `load_generator` and `options`.
"""

"""A simulated world around the real engine: clients, frontends, link, device and clock are driven by one seed.

`test_simulation.py` runs hundreds of seeds; `test_mutations.py` checks that they find planted bugs. `world.py` decides
what happens, `judge.py` raises when the engine breaks a rule, and `models.py` knows every expected token beforehand.
"""

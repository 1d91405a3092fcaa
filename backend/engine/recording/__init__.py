"""The flight recorder's side in the loop: it writes what the engine decides into a ring of records.

The engine's parts call it, so it imports none of them but their results.
"""

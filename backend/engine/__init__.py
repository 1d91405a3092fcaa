"""The engine: one loop that takes in requests, plans steps, has them run, and delivers their tokens.

Start with `loop.py`: one turn of the loop is one screen. A request goes through `intake`, where equal requests meet in
`coalescer`, and its tokens go out through `delivery`, or its vectors through `vector_delivery`; `cancellation` ends it
early. A plan goes through `batch_builder` and `executor`, which owns the device's thread, to `launched_step`. The main
thread runs everything but the executor.
The engine may import all other packages of the backend, but not `main`.
"""

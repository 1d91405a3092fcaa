"""The engine: one loop that takes in requests, plans steps, has them run, and delivers their tokens.

Start with `loop.py`: one turn of the loop is one screen. `requests` takes requests in and sends their results; equal
ones meet in `coalescer`. `steps` runs the plans, on the device's thread. `quoting` predicts when a request will finish,
and `recorder` writes down what happens. `interfaces` says what link and executor must do. The main thread runs
everything but the executor.
The engine may import all other packages of the backend, but not `start` and `main`.
"""

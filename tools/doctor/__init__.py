"""`penstock doctor`: whether this machine can serve, how fast its kernels are, and what to do about each obstacle.

Each module examines one area and yields findings; `command` collects and prints them. Nothing is changed on the
machine, except that CPU kernels are compiled into their cache, as the first start would do.
"""

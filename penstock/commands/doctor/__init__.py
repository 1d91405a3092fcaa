"""`penstock doctor`: whether this machine can serve, how fast its kernels are, and the remedy for each obstacle.

Each module examines one area and yields findings; `command` collects and prints them. Nothing on the machine changes,
except that CPU kernels are compiled into their cache, as at the first start.
"""

"""The compiled kernels: for which CPUs, how they are compiled and kept, and which are fastest on this machine."""

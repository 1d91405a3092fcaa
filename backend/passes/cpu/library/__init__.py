"""The compiled kernels: for which CPUs, how they are compiled and kept, their functions, and the structs these take."""

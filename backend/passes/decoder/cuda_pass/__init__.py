"""The decoder on a GPU: loading, memory plan, CUDA graphs and forward pass. The kernels are in `passes.cuda`."""

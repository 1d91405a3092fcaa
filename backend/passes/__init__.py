"""Forward passes: classes with the interface of `penstock.backend.forward_pass`.

`fake` is the smallest one and has no weights: start there. `decoder` runs Llama-family models on the CPU and on NVIDIA
GPUs. Passes may import `sampling`, `checkpoint` and `errors`; the engine reaches them only through the interface.
"""

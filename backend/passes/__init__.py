"""Forward passes: classes with the interface of `penstock.backend.forward_pass`.

`fake` is the smallest one and has no weights: start there. `decoder` and `encoder` run the models of `checkpoint` by
operations of a device: `ops` is what they ask for, `cpu` and `cuda` do it, each with its own kernels. `shared_weights`
keeps packed weights for other processes. `transformers_model` runs a model of transformers as it is.

Passes may import `sampling`, `checkpoint` and `errors`; the engine reaches them only through the interface.
"""

"""Vision towers beside the decoder, in torch: transformers' own modules turn pictures into embeddings.

`families`, with `qwen`, says for each architecture how pixels become embeddings, and how many; `pixels` reads how they
are normalised. `checkpoint` builds the modules from a checkpoint, without its text model. `tower` runs them; on the
CPU `native_blocks` runs the layers of most by the encoders' kernels.
"""

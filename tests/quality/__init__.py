"""Quality on real models: perplexity and greedy answers of each type of weights, token ids, and vectors of an encoder.

Two published models are downloaded through pip (`tests/real_models.py`). `recorded/` has what other programs give:

* `perplexity.json`: token ids of the beginning of the GPL-3's text; for each file of `made_files.py`, and for the
  published one (Q4_1), its SHA-256, the perplexity in fp32 of its own weights (transformers with the numbers of
  gguf.dequantize), and llama.cpp's: `llama-perplexity -m FILE -f GPL-3 -c WINDOW --chunks WINDOWS`.
* `chats.json`: token ids of prompts, rendered by the model's template, and of transformers' greedy answers in fp32 with
  the published file's weights; after each token the distance of the two largest logits.
* `token_ids.json`: texts and the ids that llama.cpp's `llama-tokenize --no-bos` gives.
"""

"""The training of the demo model.

train.py builds a corpus from the running Python installation (corpus.py, entries.py, chats.py), trains a small Llama
(network.py) and writes the checkpoint to backend/demo_model. Nothing here is used when the model is served.

Start with `main` in train.py.
"""

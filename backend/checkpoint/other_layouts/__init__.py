"""Models with other files than Hugging Face's: Mistral's own layout, and tokenizers without a tokenizer.json.

`directory.py` presents such a model as a checkpoint directory in the cache: links to the model's files, beside them the
config.json of `mistral_layout.py` and the tokenizer.json that a child process, `make_tokenizer.py`, has written. The
child reads SentencePiece models (`sentencepiece_file.py`), tiktoken files and tekken.json (`rank_files.py`), and the
files of a tokenizer class of transformers with the libraries of the extra `tokenizers`, which nothing else imports. So
frontends, grammars and passes read the same files for every model.
"""

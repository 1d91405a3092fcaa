"""Text to token ids and back, with the files of a checkpoint.

`tokenizer` loads a checkpoint's tokenizer and chat template, and encodes. `chat_template` renders messages to the
prompt's text. `detokenizer` turns a stream of token ids into text, `token_bytes` single tokens into bytes.

May import `schemas` and what lies below. Start with `tokenizer`.
"""

"""Native libraries that panic: what they raise comes as an ordinary exception.

`panics` turns a panic into an error. `tokenizer` wraps the tokenizers library; nothing else imports it.
"""

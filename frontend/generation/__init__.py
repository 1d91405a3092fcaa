"""Generates the answer to one request: from prompts as token ids to an answer, whole or streamed.

The path of a request: `submission` decides what is sampled, what ends it and what is reported, and starts one token
stream per choice; each `choice` turns its stream into pieces of text; `choice_runner` runs all choices to their end and
counts their tokens; `answers` writes the answer in the endpoint's format. `answer_rules` says what an answer must look
like (grammars from JSON schemas and tools) and how it is parsed. `served_model` has the model's tokenizer and card. May
import formats, parsing, text, schemas and what lies below. Start with `submission.submit`, then `choice`.
"""

"""Generates the answer to one request: from prompts as token ids to an answer, whole or streamed.

The path of a request: `submission` sets the sampling, the ends and the reported values, and starts one token stream per
choice; each `choice` turns its stream into pieces of text; `choice_runner` runs all choices to their end and counts
their tokens; `answers` writes the answer in the endpoint's format. `answer_rules` sets an answer's form and its
parsing. `served_model` has the model's tokenizer and card.

May import formats, parsing, text, schemas and what lies below. Start with `submission.submit`, then `choice`.
"""

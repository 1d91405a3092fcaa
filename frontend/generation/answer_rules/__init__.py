"""Decides what the answers to a request must look like, and how their text is parsed.

Two things ask for a grammar: `requested_grammar` makes one of a JSON schema, regular expression, list of choices or
grammar in the body, `tool_grammar` makes one of the tools that the model may or must call. `chat_rules` decides where
an answer starts, and combines these for a chat into `AnswerRules`. May import `served_model`, parsing, schemas and what
lies below. Start with `chat_rules`.
"""

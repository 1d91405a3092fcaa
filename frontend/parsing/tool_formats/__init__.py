"""How models write tool calls: `marked` for calls between any marks, `gemma` and `pythonic` for the others.

A format does two things: it reads the calls in an answer, and it describes their layout for the grammar of calls that
the model must make. `base` has the protocol and the reading of JSON calls, and `parameters` reads arguments that are
written one by one, with the types of their schema. May import `parsing.reader`, `parsing.json_text` and
`parsing.parsed_output`. Start with `base`, then `marked`.
"""

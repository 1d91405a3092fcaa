"""How model families write tool calls: one module per format, each with a class that implements `base.ToolFormat`.

A format does two things: it reads the calls in an answer, and it describes their layout for the grammar of calls that
the model must make. `base` has the protocol and the reading of JSON calls, and `parameters` reads arguments that are
written one by one, with the types of their schema. May import `parsing.reader`, `parsing.json_text` and
`parsing.parsed_output`. Start with `base`, then `hermes`, the simplest format.
"""

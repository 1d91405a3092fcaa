"""Sorts a model's text, while it arrives, into answer, reasoning and tool calls.

`syntax` finds the syntax of the served model's reasoning and tool calls: `reasoning` has the reasoning formats,
`tool_formats` a reader of calls between any marks and those of a few other formats, `harmony` the messages of gpt-oss.
`answer_parser` reads one choice with them. Any split of the text into pieces gives the same result, because all of them
read through `reader`. The pieces are `deltas`; `blocks` collects them.

May import text, schemas and what lies below. Start with `answer_parser`.
"""

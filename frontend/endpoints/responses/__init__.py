"""OpenAI's Responses API: a response is a chat request whose answer may be kept and may run without its client.

`endpoint` has the handlers, `items` translates items to chat messages and back, `background` runs responses without a
client as far as `background_places` has room, and the `orphans` of workers that have ended. `store` keeps responses in
a `database` that all workers share, in a directory that `state_files` chooses; `owner` names the worker that runs one.
Start with `endpoint`.
"""

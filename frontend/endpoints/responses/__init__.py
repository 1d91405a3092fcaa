"""OpenAI's Responses API: a response is a chat request whose answer may be kept and may run without its client.

`endpoint` has the handlers, `items` translates items to chat messages and back, `background` runs responses without a
client as far as `background_places` has room, `event_log` replays their events. `store` keeps responses in a `database`
that all workers share, in a directory that `state_files` chooses; `owner` names the worker that runs one. `takeover`
runs the `orphans` of dead workers again. Start with `endpoint`.
"""

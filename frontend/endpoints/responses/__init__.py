"""OpenAI's Responses API: a response is a chat request whose answer may be kept and may run without its client.

`endpoint` has the handlers, `items` translates items to chat messages and back, `background` runs responses without a
client, `event_log` replays their events, `store` keeps finished ones. Start with `endpoint`.
"""

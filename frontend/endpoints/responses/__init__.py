"""OpenAI's Responses API: a response is a chat request whose answer may be kept and may run without its client.

`endpoint` has the handlers, `items` translates items to chat messages and back, `background` runs responses without a
client as far as `background_places` has room, also those of workers that have ended. `storage` keeps them. Start with
`endpoint`.
"""

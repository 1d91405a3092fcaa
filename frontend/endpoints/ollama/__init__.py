"""Ollama's API, below /api: its bodies become chats and completions, and their answers its JSON.

`requests` receives a body; `chat`, `generate` and `embed` run models; `models` describes them; `library` is what asks
to download or delete one. Bodies are in `schemas.ollama`, answers in `formats.ollama`. Imports `answering`, `prompts`,
`pooling` and the schemas.
"""

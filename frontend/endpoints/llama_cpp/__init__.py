"""The native endpoints of llama.cpp's server that are not also another API's.

`completion` continues prompts, `infill` fills in code; `props` and `slots` describe the server. /tokenize, /detokenize
and /apply-template are in `endpoints.tokens`, /health is in `endpoints.server`. Bodies are in `schemas.completion`,
answers in `formats.llama_cpp`. Imports `answering`, `prompts` and the schemas.
"""

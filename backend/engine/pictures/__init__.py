"""Pictures in prompts, from the request to the embeddings.

`check` compares a request's pictures with its tokens and the model. `desk` decides which picture is encoded next, and
gives sequences the result. `tower_thread` runs the model's vision tower, in turns with the steps (`device_turns`).
"""

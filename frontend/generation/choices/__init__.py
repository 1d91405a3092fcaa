"""One answer of a request: its tokens become text, log probabilities and an end; several of them become an answer."""

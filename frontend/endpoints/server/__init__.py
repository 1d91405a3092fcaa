"""Endpoints about the server and about other requests: health, metrics, models, quotes, streams, cancellation."""

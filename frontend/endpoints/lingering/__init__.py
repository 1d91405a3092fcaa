"""The endpoints of streams that outlive their connection: read one again, or drop it.

Start with `streams`. The endpoint that made the stream answers again (`penstock.frontend.generation.lingering`).
"""

"""Endpoints whose answers are vectors or scores, one module for each API's family; they differ in fields and formats.

All of them use `computing`, from a checked body to results. Start with `openai_embeddings`.
"""

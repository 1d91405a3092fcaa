"""Faults that an operator can put right: said in one line, never with a traceback."""


class StartupError(Exception):
    """The backend cannot start as asked. The message names the value, the limit and the remedy."""

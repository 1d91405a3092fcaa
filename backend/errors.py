"""Errors that an operator can fix. They are printed as one line, never with a traceback."""


class StartupError(Exception):
    """The backend cannot start with these options. The message names the value, the limit and what to do."""

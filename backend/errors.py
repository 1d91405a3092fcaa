"""Errors that an operator can fix. They are printed as one line, never with a traceback."""


class StartupError(Exception):
    """The backend cannot start with these options. The message names the value, the limit and what to do."""

    def __init__(self, message: str) -> None:
        """Line ends and escape sequences, which may come from a file, are written as Python's escapes."""
        super().__init__("".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in message))


class NoRoomBeside(StartupError):
    """There is no memory for this backend beside the one that it would replace."""


NO_ROOM_STATUS = 75
"""Exit status of a backend that ends with `NoRoomBeside`: EX_TEMPFAIL."""

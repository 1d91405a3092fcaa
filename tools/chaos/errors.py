"""The command's own errors: it cannot run."""

COMMAND = "penstock chaos"


class ChaosError(Exception):
    """The run cannot start or continue. The message is one line for the operator."""

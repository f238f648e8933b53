"""Errors that are meant for the person at the keyboard."""

from pathlib import Path


class GradtraceError(Exception):
    """Something the user can mend. The message says what is wrong, where, and what to do.

    The command line prints the message alone; a traceback would bury it.
    """


def install(extra: str) -> str:
    """The command that installs an extra: with the pinned versions, where gradtrace runs from a checkout."""
    checkout = Path(__file__).parents[2]
    if (checkout / "constraints.txt").is_file():
        return f"pip install -c {checkout}/constraints.txt -e '{checkout}[{extra}]'"
    return f"pip install 'gradtrace[{extra}]'"

"""Errors that are meant for the person at the keyboard."""


class GradtraceError(Exception):
    """Something the user can mend. The message says what is wrong, where, and what to do.

    The command line prints the message alone; a traceback would bury it.
    """

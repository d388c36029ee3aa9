"""Errors that the user can mend."""


class UserError(Exception):
    """An error that the user can mend; one sentence says how."""


def first_line(problem: Exception) -> str:
    """The first line of a library's error message."""
    return (getattr(problem, "strerror", None) or str(problem) or repr(problem)).splitlines()[0]

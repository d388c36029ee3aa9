"""Errors that the user can mend."""


class UserError(Exception):
    """An error that the user can mend; one sentence says how."""


def first_line(problem: Exception) -> str:
    """The first line of a library's error message, or what it means here."""
    if "trust_remote_code" in str(problem):
        return "it needs code of its own, which is not run here"
    return (getattr(problem, "strerror", None) or str(problem) or repr(problem)).splitlines()[0]

"""Errors that the user can mend."""


class UserError(Exception):
    """Reports an error that the user can mend; one sentence says how."""


def first_line(problem: Exception) -> str:
    """Return the first line of a library's error message, with the next one if it ends in a colon;
    or what the message means here."""
    if "trust_remote_code" in str(problem):
        return "it needs code of its own, which is not run here"
    message = getattr(problem, "strerror", None) or str(problem).strip() or repr(problem)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])

"""What a trial can come to beside holding."""

from __future__ import annotations


class Broken(Exception):
    """A promise was not kept; the message says which."""


class Missed(Exception):
    """The fault was not put in: the run had passed the moment. To be tried again."""


class Skipped(Exception):
    """This machine cannot have this fault."""


class Undisturbed(Exception):
    """The run without a fault does not finish, so nothing can be compared with it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the undisturbed run ended with exit code {code}:\n{text.strip()}")
        self.code, self.text = code, text


def require(holds: object, otherwise: str) -> None:
    """Broken with the message, unless it holds."""
    if not holds:
        raise Broken(otherwise)

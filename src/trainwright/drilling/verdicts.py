"""The verdicts of a trial that did not hold."""

from __future__ import annotations


class Broken(Exception):
    """A promise was not kept; the message says which."""


class Missed(Exception):
    """The fault was not injected, because the run had passed the moment. The trial is repeated."""


class Skipped(Exception):
    """This fault cannot be injected on this machine."""


class Undisturbed(Exception):
    """The run without a fault does not finish, so nothing can be compared with it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the undisturbed run ended with exit code {code}:\n{text.strip()}")
        self.code, self.text = code, text


def require(holds: object, otherwise: str) -> None:
    """Raise Broken with the message unless the condition holds."""
    if not holds:
        raise Broken(otherwise)

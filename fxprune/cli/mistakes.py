"""The user's mistakes at the command line."""

from __future__ import annotations

from click import ClickException


class Mistake(ClickException):
    """Told in a line or two, with exit status 2."""

    exit_code = 2

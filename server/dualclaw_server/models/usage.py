"""Numbers of tokens as vendors report them."""

from collections.abc import Mapping

from dualclaw import Usage

MOST_TOKENS = 2**31 - 1
"""What a field of Usage can hold."""


def set_tokens(usage: Usage, found: Mapping[str, object]) -> Usage:
    """Set the fields that are numbers of tokens, and return the usage."""
    for name, reported in found.items():
        value = int(reported) if isinstance(reported, float) and reported.is_integer() else reported
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS:
            setattr(usage, name, value)
    return usage

"""One check, as data."""

from dataclasses import dataclass
from typing import Literal

Target = Literal["engine", "native", "original"]
"""What a check is about: an engine, or a web gateway by one of its routes."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is checked."""

    id: str
    title: str
    """What has to be so, in one line."""
    text: str
    """The rule for somebody who has not read the contract, and what goes wrong where it is broken."""
    section: str
    """Section of the contract."""
    place: str
    """Message, field, enum or rpc of the protos whose comment says it."""
    targets: tuple[Target, ...] = ("engine",)
    implies: tuple[str, ...] = ()
    """Checks that may fail because this one does."""
    needs: str = ""
    """Option without which it is not checked; "" for none."""

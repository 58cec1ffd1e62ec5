"""Who calls: what authentication found out, passed explicitly to whatever acts for them."""

from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["user", "operator", "service"]
ROLES: frozenset[str] = frozenset(get_args(Role))


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. ``tenant`` scopes everything it can see; ``subject`` names it in records."""

    tenant: str
    subject: str
    roles: frozenset[str]


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The trace a call belongs to: W3C trace id (32 hex digits, never all zero), caller's span (16 or none)."""

    trace_id: str
    span_id: str = ""

"""What the gate finds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that would break."""

    rule: str
    """Id of the rule, such as FIELD_NO_DELETE."""
    where: str
    """What it is about: a field, an enum value, a file or a vector."""
    what: str
    """What has changed."""
    who: str
    """What would break for whom."""
    source: str = "dualclaw"
    """Who judged: buf or dualclaw."""
    file: str = ""
    """Path of the file as buf names it; "" when unknown."""
    line: int = 0
    """Line in the file; 0 when unknown."""

"""Reads SKILL.md: front matter with a name and a description, then instructions in Markdown.

The format is the public one of Agent Skills. Its front matter is YAML, of which skills use little: keys at the
margin with plain, quoted or block texts. Exactly that is read here; what is nested below a key (``metadata``) is
passed over, and what is neither is a fault with its line. So no YAML parser is needed, and a colon inside of a
description, which many files have and YAML forbids, does no harm.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

MAX_NAME = 64
MAX_DESCRIPTION = 1_024
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_KEY = re.compile(r"([A-Za-z][A-Za-z0-9_-]*):(?:[ \t]+(.*))?")
_BLOCK = re.compile(r"([|>])[+-]?\d?[+-]?(?:[ \t]+#.*)?")


class SkillFault(ValueError):
    """A SKILL.md cannot be used; the text names every fault."""


@dataclass(frozen=True, slots=True)
class SkillText:
    """A SKILL.md as it was read."""

    name: str
    description: str
    body: str
    """The instructions."""


def parse_skill(text: str, folder: str) -> SkillText:
    """Read a SKILL.md that lies in a folder of that name. Raises SkillFault."""
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        raise SkillFault("it must begin with a line of ---, the front matter")
    end = next((n for n, line in enumerate(lines[1:], 1) if line.rstrip() in ("---", "...")), 0)
    if not end:
        raise SkillFault("its front matter has no end, a line of ---")
    values, faults = _front_matter(lines[1:end])
    name, description = values.get("name", ""), values.get("description", "")
    if not name or len(name) > MAX_NAME or not _NAME.fullmatch(name):
        faults.append(f"its name must be 1 to {MAX_NAME} of a-z, 0-9 and single - between them, not {name[:100]!r}")
    elif name != folder:
        faults.append(f"its name {name!r} must be that of its folder, {folder!r}")
    if not description or len(description) > MAX_DESCRIPTION:
        faults.append(f"its description must have 1 to {MAX_DESCRIPTION} characters, not {len(description)}")
    if faults:
        raise SkillFault("; ".join(faults))
    return SkillText(name, description, "\n".join(lines[end + 1 :]).strip())


def _front_matter(lines: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the texts at the margin by their key, and the faults."""
    values: dict[str, str] = {}
    faults: list[str] = []
    place = 0
    while place < len(lines):
        line = lines[place]
        place += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _KEY.fullmatch(line.rstrip())
        if found is None:
            faults.append(f"line {place + 1} of its front matter is no 'key: text'")
            continue
        below = []
        while place < len(lines) and (not lines[place].strip() or lines[place][0] in " \t"):
            below.append(lines[place])
            place += 1
        key, value = found[1], (found[2] or "").strip()
        if key in values:
            faults.append(f"it has two of {key}")
        try:
            values[key] = _text(value, below)
        except ValueError:
            faults.append(f"the text of {key} in its front matter cannot be read")
    return values, faults


def _text(value: str, below: list[str]) -> str:
    """Return a text that begins on its key's line and may go on below. Raises ValueError."""
    block = _BLOCK.fullmatch(value)
    if block is not None:
        return _block(below, folded=block[1] == ">")
    whole = " ".join([value, *(line.strip() for line in below if line.strip())]).strip()
    if not value:
        nested = any(_KEY.match(line.strip()) or line.strip().startswith("- ") for line in below)
        return "" if nested else whole
    if whole.startswith('"'):
        quoted = re.match(r'("(?:[^"\\]|\\.)*")\s*(?:#.*)?$', whole)
        if quoted is None:
            raise ValueError("no end of the quoted text")
        return str(json.loads(quoted[1]))
    if whole.startswith("'"):
        quoted = re.match(r"'((?:[^']|'')*)'\s*(?:#.*)?$", whole)
        if quoted is None:
            raise ValueError("no end of the quoted text")
        return quoted[1].replace("''", "'")
    return re.sub(r"\s+#.*$", "", whole)


def _block(lines: list[str], *, folded: bool) -> str:
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    text = "\n".join(line[indent:].rstrip() for line in lines).strip("\n")
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text).replace("\n\n", "\n") if folded else text

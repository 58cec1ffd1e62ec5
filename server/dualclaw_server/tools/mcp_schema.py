"""An MCP server's description of a tool as one of this engine: a legal name, a schema that can be used, an effect.

Rules

- Names are ``server__tool``. One that is not legal or too long is changed and gets six digits of a hash of the
  original, so that it stays unique and the same in every process, whatever else there is: runs are resumed by name.
- A schema is used only if it can be: one that is no JSON Schema of this day, or refers to what is not inside it, is
  told to the model in words, and the server checks arguments alone. A reference is never followed out of the schema:
  a server could have this engine fetch any address.
- Patterns of servers that are not trusted are told in words too: a regular expression can keep a process busy for
  years.
- The effect class is what the server's hints say only if it is trusted. Else every tool counts as "once".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping

import jsonschema
import referencing
import referencing.exceptions
from jsonschema.validators import Draft202012Validator
from mcp_types import Tool as ListedTool
from referencing.jsonschema import DRAFT202012

from dualclaw.events import clean_text
from dualclaw_server.engine.tool import Effect
from dualclaw_server.tools.mcp_spec import Spec

MAX_DESCRIPTION = 4_000
"""Characters of a description; it is the server's, goes into every model call, and is paid for."""
MAX_SCHEMA = 64 * 1024
"""Characters of a schema."""
_MAX_NAME = 64
_MAX_DEPTH = 50
_DATA = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are data and no schemas."""
_NAMED = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name; the names mean nothing."""

Schema = dict[str, object]


def tool_name(server: str, name: str) -> str:
    """Return the name a server's tool has here."""
    plain = f"{server}__{name}"
    legal = re.sub(r"[^a-zA-Z0-9_-]", "_", plain)
    if legal == plain and len(plain) <= _MAX_NAME:
        return plain
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:6]
    return f"{legal[: _MAX_NAME - 7]}_{digest}"


def effect_of(spec: Spec, listed: ListedTool) -> Effect:
    """Return what may be done with a call whose outcome is unknown."""
    hints = listed.annotations if spec.trusted else None
    if hints is None:
        return "once"
    if hints.read_only_hint:
        return "read"
    return "idempotent" if hints.idempotent_hint else "once"


def description_of(listed: ListedTool, note: str) -> str:
    """Return what a model is told a tool is for; ``note`` is added."""
    text = clean_text(listed.description or listed.title or listed.name)
    if len(text) > MAX_DESCRIPTION:
        text = f"{text[:MAX_DESCRIPTION]}..."
    return f"{text}\n\n{note}".strip() if note else text


def schema_of(spec: Spec, listed: ListedTool) -> tuple[Schema, str]:
    """Return the schema of a tool's arguments, and what it cannot say in words for the description."""
    try:
        text = json.dumps(listed.input_schema, ensure_ascii=False)
        schema: Schema = json.loads(clean_text(text))
        if len(text) <= MAX_SCHEMA and not _fault(schema):
            return (schema if spec.trusted else _without_patterns(schema)), ""
    except (ValueError, RecursionError):
        text = "{}"
    shown = text if len(text) <= MAX_DESCRIPTION else f"{text[:MAX_DESCRIPTION]}..."
    return {"type": "object"}, f"Arguments: a JSON object as this schema says: {shown}"


def _fault(schema: Schema) -> str:
    """Return why a schema cannot be used; empty when it can."""
    if schema.get("type") != "object":
        return "it is not of type object"
    try:
        Draft202012Validator.check_schema(schema)
        resolver = (
            referencing.Registry[object]()
            .with_resource("", referencing.Resource.from_contents(schema, default_specification=DRAFT202012))
            .resolver()
        )
        for key, target in _references(schema, 0):
            if key != "$ref" or not target.startswith("#"):
                return f"it refers to {target}"
            resolver.lookup(target)
        # What remains is found by trying: loops of references, expressions that are none.
        jsonschema.exceptions.best_match(
            Draft202012Validator(schema, registry=referencing.Registry()).iter_errors({"": {"": [""]}})
        )
    except jsonschema.SchemaError as error:
        return error.message
    except (referencing.exceptions.Unresolvable, RecursionError, re.error) as error:
        return str(error)
    return ""


def _references(node: object, depth: int) -> Iterator[tuple[str, str]]:
    """Yield every reference, wherever it stands; one inside of data is none, and does no harm."""
    if depth > _MAX_DEPTH:
        raise RecursionError("it is nested too deep")
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key in ("$ref", "$dynamicRef", "$recursiveRef", "$id") and isinstance(value, str):
                yield key, value
            elif key not in _DATA:
                yield from _references(value, depth + 1)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value, depth + 1)


def _without_patterns(node: Schema) -> Schema:
    """Return a schema that has no regular expression in it; what they were is said in descriptions."""
    made: Schema = {}
    dropped = {"patternProperties", "propertyNames"}
    if "patternProperties" in node:
        dropped.add("additionalProperties")  # it would refuse names that a pattern allows
    if isinstance(node.get("pattern"), str):
        dropped.add("description")  # written anew
    for key, value in node.items():
        if key == "pattern" and isinstance(value, str):
            made["description"] = f"{node.get('description', '')} Pattern: {value[:200]}".strip()
        elif key in dropped:
            continue
        elif key in _NAMED and isinstance(value, dict):
            made[key] = {name: _inner(inner) for name, inner in value.items()}
        else:
            made[key] = value if key in _DATA else _inner(value)
    return made


def _inner(value: object) -> object:
    if isinstance(value, dict):
        return _without_patterns(value)
    if isinstance(value, list):
        return [_inner(item) for item in value]
    return value

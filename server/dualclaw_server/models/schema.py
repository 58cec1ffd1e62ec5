"""Schemas of structured output: read, and judged for the strict mode of OpenAI's APIs.

Strict mode compiles the schema into what the model may write, and refuses with a 400 what it cannot compile. So it
is asked for exactly when a schema stays within it: objects closed and all their properties required, and none but
the keywords below.
"""

import msgspec

from dualclaw_server.engine.model import ModelError

_KEYWORDS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf"),
        *("$ref", "$defs", "definitions", "title", "description", "pattern", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems"),
    }
)
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})


def read_schema(text: str) -> dict[str, object]:
    """Return a response schema.

    Raises:
        ModelError: MODEL_BAD_RESPONSE, it is not a JSON object.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(
            "MODEL_BAD_RESPONSE", f"The response schema is no JSON object: {error}", retryable=False
        ) from None


def fits_strict_mode(schema: dict[str, object]) -> bool:
    """Return whether strict mode takes this schema as it is."""
    return schema.get("type") == "object" and "anyOf" not in schema and _fits(schema)


def _fits(schema: object) -> bool:
    if not isinstance(schema, dict) or not _KEYWORDS.issuperset(schema):
        return False
    properties = schema.get("properties", {})
    if schema.get("type") == "object" or "properties" in schema:
        required = schema.get("required", [])
        if schema.get("additionalProperties") is not False or not isinstance(properties, dict):
            return False
        if not isinstance(required, list) or {*map(str, required)} != {*properties}:
            return False
    if "format" in schema and schema["format"] not in _FORMATS:
        return False
    inner: list[object] = [*properties.values()] if isinstance(properties, dict) else []
    for name in ("$defs", "definitions"):
        named = schema.get(name, {})
        inner += named.values() if isinstance(named, dict) else [named]
    choices = schema.get("anyOf", [])
    inner += choices if isinstance(choices, list) else [choices]
    if "items" in schema:
        inner.append(schema["items"])
    return all(map(_fits, inner))

"""Response schemas as the structured output of the Anthropic API takes them.

The API compiles a schema into what the model may write. It refuses objects that are not closed, and bounds it
cannot compile. So objects are closed, which says no more than that the answer has nothing but the named
properties; and a bound moves into the description, where the model at least reads it. A schema whose meaning this
would change, such as one with free keys, is not expressible.
"""

from collections.abc import Mapping

_BOUNDS = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
        *("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties"),
    }
)
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"},
)
_FREE = frozenset(
    {
        *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "if", "then", "else", "not"),
        *("prefixItems", "contains", "unevaluatedProperties", "unevaluatedItems", "oneOf"),
    }
)
_MAPS = ("properties", "$defs", "definitions")


def closed_schema(schema: Mapping[str, object]) -> dict[str, object] | None:
    """Return the schema in the API's form, or None if it has none there."""
    if not _FREE.isdisjoint(schema) or schema.get("additionalProperties", False) is not False:
        return None
    made: dict[str, object] = {}
    bounds: list[str] = []
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            inner = {key: _closed(each) for key, each in value.items()}
            if None in inner.values():
                return None
            made[name] = inner
        elif name in ("anyOf", "allOf") and isinstance(value, list):
            choices = [_closed(each) for each in value]
            if None in choices:
                return None
            made[name] = choices
        elif name == "items":
            if (items := _closed(value)) is None:
                return None
            made[name] = items
        elif name in _BOUNDS and not (name == "minItems" and value in (0, 1)):
            bounds.append(f"{name}: {value}")
        elif name == "format" and value not in _FORMATS:
            bounds.append(f"format: {value}")
        elif name != "$schema":
            made[name] = value
    if schema.get("type") == "object" or "properties" in schema:
        if "properties" not in schema:
            return None
        made["additionalProperties"] = False
    if bounds:
        said = schema.get("description")
        made["description"] = "; ".join([*([said] if isinstance(said, str) and said else []), *bounds])
    return made


def _closed(schema: object) -> object | None:
    if isinstance(schema, dict):
        return closed_schema(schema)
    return None

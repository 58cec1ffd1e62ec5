"""What a person typed as the response a question takes, for every channel in which people type.

The engine reads a plain message in the same way, so the same words mean the same wherever they are written:

- A choice is named by its text, whatever the case, or by its number if all choices are text.
- Words are text wherever the question takes text: "7" stays words unless a number is asked for.
- Elsewhere they are the JSON they are. What fits nothing goes out as text, for the engine to refuse in its own words.
"""

import json
from collections.abc import Mapping, Sequence


def response_json_of(text: str, schema_json: str) -> str:
    """Return typed words as a response: the choice they name, text, or the JSON they are where text is not taken."""
    plain = json.dumps(text, ensure_ascii=False)
    try:
        schema: object = json.loads(schema_json or "{}")
    except (ValueError, RecursionError):
        return plain
    if not isinstance(schema, dict):
        return plain
    variants = schema.get("anyOf")
    kinds = [kind for kind in (schema, *(variants if isinstance(variants, list) else ())) if isinstance(kind, dict)]
    named = _named(text, kinds)
    if named is not None:
        return json.dumps(named, ensure_ascii=False)
    if _takes_text(kinds):
        return plain
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return plain
    return text


def _named(text: str, kinds: Sequence[Mapping[str, object]]) -> str | None:
    """Return the choice that words name; None if they name none."""
    for kind in kinds:
        choices = kind.get("enum")
        if isinstance(choices, list):
            break
    else:
        return None
    texts = [choice for choice in choices if isinstance(choice, str)]
    meant = [choice for choice in texts if choice.casefold() == text.casefold()]
    if meant:
        return text if text in meant else meant[0]
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
    return texts[number - 1] if len(texts) == len(choices) and 0 < number <= len(texts) else None


def _takes_text(kinds: Sequence[Mapping[str, object]]) -> bool:
    types = [kind["type"] for kind in kinds if "type" in kind]
    if any(type_ == "string" or (isinstance(type_, list) and "string" in type_) for type_ in types):
        return True
    return not types and not any("enum" in kind for kind in kinds)

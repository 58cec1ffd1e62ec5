"""Names that credentials stand under, and what under such a name is none.

A name makes a credential of what follows it: ``password=hunter2``, ``"api_key": "..."``, ``--token ...``,
``<secret>...</secret>``, a ``name``/``value`` pair. Strong names do so for any value; weak ones (token, secret)
are also words of everyday data, so their value must look like a token. What is plainly code, a type, a
placeholder or a sentence stays as it is; in doubt it is masked.
"""

from __future__ import annotations

import re
from typing import Literal

PASSES = r"pass(?:word|wd|phrase|wort)|pwd|密码|口令"
TAILS = r"key|token|secret|credentials?"
"""What the other names end in; searched first, for a long alternative at every character is slow."""
STRONG = (
    rf"(?:{PASSES}"
    r"|(?:client|app|corp|consumer|signing|webhook|shared|jwt|api|oauth|bot)[ _.-]?secret"
    r"|secret[ _.-]?(?:access[ _.-]?)?key"
    r"|(?:private|api|access|account|encryption|master|signing|subscription|auth|storage)[ _.-]?key"
    r"|(?:access|refresh|auth|bearer|session|security|api|bot|oauth|private|(?<![a-z])id)[ _.-]?token)"
)
WEAK = r"(?:token|secret|credentials?)"

_SEPARATOR = r"[\"'`]?[ \t]{0,8}(?:=>|:=|={1,3}|[:：])[ \t]{0,8}"
# Up to a blank or what ends a value in code, in an address, in a list; a bracket within a value belongs to it.
_BARE = (
    r"(?:[^\s\"'`;&<>,)\]}\\]|\\(?![nrtu\"])|&(?![\w.-]{1,40}=)|,(?!\s|[\w.-]{1,40}[\"']?[=:]|$)"
    r"|[)\]}](?![\s,;.:)\]}\"']|$)){1,512}+"
)
_VALUE = (
    r"[\"'`]?+(?P<secret>(?<=\")(?:[^\"\\\r\n]|\\.){1,4096}+|(?<=')(?:[^'\\\r\n]|\\.){1,4096}+"
    rf"|(?<=`)[^`\r\n]{{1,4096}}+|(?<![\"'`]){_BARE})"
)


def _patterns(names: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    name = rf"(?P<name>(?i:{names}))\d{{0,2}}"
    pair = (
        rf"(?i:name|key)[\"']?\s{{0,4}}[:=]\s{{0,4}}[\"']?[\w.-]{{0,40}}?{name}[\"']?,?\s{{1,40}}"
        rf"[\"']?(?i:value)[\"']?\s{{0,4}}[:=]\s{{0,4}}{_VALUE}"
    )
    return (
        (rf"{name}{_SEPARATOR}{_VALUE}", ()),
        (rf"(?<![\w-])--?[\w-]{{0,30}}?{name}[ \t]{{1,4}}(?!-){_VALUE}", ("--", "-pass", "-key", "-token", "-secret")),
        (rf"<[\w:.-]{{0,40}}?{name}[\w.-]{{0,16}}(?:\s[^<>]{{0,200}})?>(?P<secret>[^<\r\n]{{1,512}}+)<", ("</",)),
        (pair, ("value",)),
    )


NAMED: tuple[tuple[str, re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (kind, re.compile(pattern), more or hints)
    for kind, names, hints in (
        ("password", PASSES, ("pass", "pwd", "密码", "口令")),
        ("secret", TAILS, ("key", "token", "secret", "credential")),
    )
    for pattern, more in _patterns(names)
)
"""Rule ids, patterns and hints; ``is_secret_pair`` is the check of each."""

_MARKER = re.compile(r"\[masked:[a-z0-9-]+\]")
_PLACEHOLDER = re.compile(
    r"\$\{[^}]*\}?|\$\(.*|\$[A-Za-z_]+|%[A-Za-z_]+%|%[sdr]|\{+[\w .|:$-]*\}*|<[^>]*>?|[*•.xX#_-]+|[(\[{)\]}]+"
)
_CALL = re.compile(r"(?:[A-Za-z_][A-Za-z_.]*|[a-z_]+\d{1,3}[a-z_]*)[(\[]")
_ATTRIBUTE = re.compile(r"&?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+[)\]}]*")
_ROOT = re.compile(
    r"(?i)&?(?:self|this|cls|os|env|process|import|conf|config|cfg|settings|args|opts|options|params|req|request|ctx"
    r"|context|creds|credentials|user|data|props|secrets|app|vault|system|environment|form|body|st|var|local|module)\."
)
_STRONG_END = re.compile(rf"(?i){STRONG}$")
_WEAK_END = re.compile(rf"(?i)(?:{WEAK}|authorization|cookie)$")
_PASSES = re.compile(rf"(?i:{PASSES})")
_IDENTIFIER = re.compile(r"[A-Za-z_]+")
_NAMES = re.compile(rf"(?i:{PASSES}|{TAILS}|pw)")
_SHORTEST_WORD = 12
"""Letters of a bare word from which on it can be a key; passwords can be shorter."""
_TOKEN_SHAPE = re.compile(r"[\w./+=~:@%-]{8,}")
_PAGING = re.compile(
    r"(?i)(?:page|next|prev|previous|continuation|continue|cursor|sync|resume|pagination|start|end|stop|eos|bos|pad"
    r"|unk|mask|sep|cls|special|num|max|min|count|per|lookup|position)[ _.-]?$"
)
_WORDS = frozenset(
    """
    str string text int integer number bool boolean bytes float double char object any none null nil undefined true
    false yes no on off secretstr optional required missing invalid wrong incorrect expired unset empty changed
    must should shall is are was were be been has have had do does did the a an this that these those to your you
    we our i my it its use using used not and or but for with without in on of at by from as can cannot could will
    would may might if when where which who how why please enter set see at least only then than so too very all
    each every some need needs never always after before because auto default redacted hidden masked varchar
    username user let const var function def return
    """.split()  # noqa: SIM905  # a hundred quotes would hide the words
)
"""What follows such a name in sentences and in code."""


def secret_name(name: str) -> Literal["", "strong", "weak"]:
    """Say what a key of JSON data makes of its value: a credential, one if it looks like it, or nothing."""
    base = re.sub(r"s?\d{0,2}$", "", name.strip()[-80:])
    if found := _STRONG_END.search(base):
        return "" if _PAGING.search(base[: found.start()]) else "strong"
    if found := _WEAK_END.search(base):
        return "" if _PAGING.search(base[: found.start()]) else "weak"
    return ""


def is_secret_pair(match: re.Match[str]) -> bool:
    """Say whether a name and the value after it, as a pattern of NAMED found them, are a credential."""
    value, text, start = match["secret"], match.string, match.start("secret")
    masked = _MARKER.match(text, start)  # a bracket at the end may not be part of the value
    if (masked and masked.end() >= match.end("secret")) or _PLACEHOLDER.fullmatch(value):
        return False
    name_start, name_end = match.span("name")
    name = text[name_start:name_end].lower()
    kind = secret_name(text[max(0, name_start - 24) : name_end])
    quote = text[start - 1] if text[start - 1] in "\"'`" else ""
    if quote and _closes_string(text, name_start, quote) and re.match(r"\s*[)+,;.%}\]:]", value):
        return False
    if not kind or (kind == "weak" and not _looks_like_token(value)):
        return False
    if name == "pwd" and re.match(r"[/~]|[A-Za-z]:\\", value):  # the working directory
        return False
    if quote:
        return True
    compared = "==" in text[name_end:start]
    short = not _PASSES.fullmatch(name) and len(value) < _SHORTEST_WORD and _IDENTIFIER.fullmatch(value)
    return not (compared or short or _is_plain(value))


def _is_plain(value: str) -> bool:
    """Tell code, types and sentences from a bare value."""
    word = value.strip(".,:;!?()[]{}").lower()
    if word in _WORDS or "\u3000" <= value[0] <= "\u9fff" or value[0] in "，。：（「“":
        return True
    if _CALL.match(value):
        return True
    if _ATTRIBUTE.fullmatch(value):
        return bool(_ROOT.match(value) or _NAMES.search(value))
    bare = value.strip(")]}")
    return bool(_IDENTIFIER.fullmatch(bare) and _NAMES.search(bare))


def _looks_like_token(value: str) -> bool:
    found = _TOKEN_SHAPE.match(value)
    if found is None or not any(c.isalpha() for c in found[0]):
        return False
    return any(c.isdigit() for c in found[0]) or len(found[0]) >= 24


def _closes_string(text: str, start: int, quote: str) -> bool:
    """Tell whether the quote after the name may end a string that the name stands in: ``input("Password: ")``."""
    return text[max(0, start - 400) : start].rpartition("\n")[2].replace(quote * 3, "").count(quote) % 2 == 1

"""What a task that is input-required asks, and how the message that answers it is read. Pure.

Rules, and why

- A question comes twice: as text with the words that answer it, for people and models, and as data, for programs.
- A message answers as data, ``{"decisions": [{"interrupt_id", "action", ...}]}``, or in words, one answer a line:
  ``approve ID``, ``reject ID why``, ``skip ID``, ``answer ID text``.
- Nobody approves what they have not seen: an approval names what it approves, and nothing may stand behind it, because
  an approval with a condition is none. The word alone counts only in a task that has never asked anything else, where
  it can mean nothing else. Refusing is the safe side: alone it means the one open question.
- Any other message, words or data, answers the open question if exactly one is open that takes an answer.
- All or nothing: if a line or an entry is unclear, nothing is carried out and the task says how to answer.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from a2a.types.a2a_pb2 import Part

from dualclaw import Decision, DecisionAction, InterruptItem, InterruptKind, RememberScope
from dualclaw_clients.a2a.parts import data_part, data_value, text_part
from dualclaw_clients.adapters.questions import actions_of, visible

_APPROVE = DecisionAction.DECISION_ACTION_APPROVE
_REJECT = DecisionAction.DECISION_ACTION_REJECT
_SKIP = DecisionAction.DECISION_ACTION_SKIP
_RESPOND = DecisionAction.DECISION_ACTION_RESPOND

WORDS: Final[Mapping[str, DecisionAction.ValueType]] = MappingProxyType(
    {
        "approve": _APPROVE, "approved": _APPROVE, "yes": _APPROVE, "ok": _APPROVE,
        "reject": _REJECT, "rejected": _REJECT, "no": _REJECT,
        "skip": _SKIP,
        "answer": _RESPOND,
    }
)  # fmt: skip
ACTIONS: Final = MappingProxyType(
    {DecisionAction.Name(a).removeprefix("DECISION_ACTION_").lower(): a for a in DecisionAction.values() if a}
)
SCOPES: Final = MappingProxyType(
    {RememberScope.Name(s).removeprefix("REMEMBER_SCOPE_").lower(): s for s in RememberScope.values() if s}
)
_TEXTS: Final = ("interrupt_id", "args_json", "response_json", "comment", "args_hash")
_KEYS: Final = frozenset({*_TEXTS, "action", "args", "response", "remember"})
_LINE: Final = re.compile(r"\s*(?P<word>[A-Za-z]+)[\s:]+(?P<rest>\S.*)", re.DOTALL)


class Unclear(Exception):
    """A message is no answer; says what is wrong and what would be right."""


def question_parts(items: Sequence[InterruptItem], problem: str = "") -> list[Part]:
    """Return what a task asks: text with how to answer it, and the same as data."""
    lines = [f"That was no answer: {problem}", ""] if problem else []
    lines.append("Before this task goes on it needs an answer to this:")
    for number, item in enumerate(items, 1):
        lines += ["", *_asked(number, item)]
    lines += ["", 'Answer with a message to this task, in these words or as data: {"decisions": [...]}.']
    example = [
        {"interrupt_id": item.id, "action": next((name for name, a in ACTIONS.items() if a in actions_of(item)), "")}
        for item in items
    ]
    data = {"questions": [_question_data(item) for item in items], "answer_with": {"decisions": example}}
    return [text_part("\n".join(lines)), data_part(data)]


def _asked(number: int, item: InterruptItem) -> list[str]:
    is_question = item.kind == InterruptKind.INTERRUPT_KIND_QUESTION
    lines = [f"{number}. {visible(item.prompt.strip() or ('Please say more' if is_question else 'May this run?'))}"]
    if item.tool_name and not is_question:
        lines.append(f"   Tool: {visible(item.tool_name)}")
    if item.args_json and not is_question:
        lines.append(f"   Arguments: {visible(item.args_json)}")
    words = {_APPROVE: "approve {id}", _REJECT: "reject {id} WHY", _SKIP: "skip {id}", _RESPOND: "answer {id} TEXT"}
    offered = [f"`{words[action].format(id=visible(item.id))}`" for action in actions_of(item) if action in words]
    if offered:
        lines.append(f"   Answer: {' or '.join(offered)}")
    return lines


def _question_data(item: InterruptItem) -> Mapping[str, object]:
    """Return a question as data; arguments stay JSON text, because numbers of A2A's data lose digits."""
    names = {action: name for name, action in ACTIONS.items()}
    found: dict[str, object] = {
        "interrupt_id": item.id,
        "kind": InterruptKind.Name(item.kind).removeprefix("INTERRUPT_KIND_").lower(),
        "prompt": item.prompt,
        "allowed_actions": [names[action] for action in actions_of(item)],
        "tool_name": item.tool_name,
        "args_json": item.args_json,
        "response_schema_json": item.response_schema_json,
        "args_hash": item.args_hash,
        "path": list(item.path),
    }
    if item.HasField("expire_time"):
        found["expire_time"] = item.expire_time.ToJsonString()
    return {name: value for name, value in found.items() if value}


def read_answer(parts: Sequence[Part], items: Sequence[InterruptItem], ever: Collection[str]) -> list[Decision]:
    """Return the decisions a message means.

    Args:
        parts: of the message.
        items: the questions it may answer.
        ever: ids of everything the task has ever asked.

    Raises:
        Unclear: it means none, or not clearly.
    """
    data = [data_value(part) for part in parts if part.WhichOneof("content") == "data"]
    text = "\n".join(part.text for part in parts if part.WhichOneof("content") == "text").strip()
    if not items:
        raise Unclear("the task has asked nothing.")
    if any(part.WhichOneof("content") in ("raw", "url") for part in parts):
        raise Unclear("files answer no question; answer in words or as data.")
    given = [value for value in data if isinstance(value, dict) and "decisions" in value]
    if given:
        if len(data) > 1 or set(given[0]) != {"decisions"}:
            raise Unclear("give all decisions in one data part, with nothing beside them.")
        return _each_once(_from_data(given[0]["decisions"], items))
    if not data and (decisions := _from_words(text, items, ever)):
        return _each_once(decisions)
    asked = [item for item in items if _RESPOND in actions_of(item)]
    questions = [item for item in asked if item.kind == InterruptKind.INTERRUPT_KIND_QUESTION]
    if len(questions) != 1 or not (data or text):
        raise Unclear("it does not say which question it answers, or how.")
    if data and (text or len(data) > 1):
        raise Unclear("a question takes one answer, text or data.")
    value = data[0] if data else text
    return [Decision(interrupt_id=questions[0].id, action=_RESPOND, response_json=_json(value))]


def _from_words(text: str, items: Sequence[InterruptItem], ever: Collection[str]) -> list[Decision]:
    """Return the decisions a text means in words; none when it is in no such words."""
    alone = WORDS.get(text.rstrip(".! ").lower())
    if alone is not None and alone != _RESPOND:
        takes_text = any(item.kind == InterruptKind.INTERRUPT_KIND_QUESTION for item in items)
        if takes_text and alone != _SKIP:
            return []  # "yes" is the answer to a question
        is_meant = len(items) == 1 and alone in actions_of(items[0])
        if is_meant and (alone != _APPROVE or len(ever) == 1):
            return [Decision(interrupt_id=items[0].id, action=alone)]
        raise Unclear(f'say what "{text}" is about: the word, then the id of the question.')
    read = [_line(line, items) for line in text.splitlines() if line.strip()]
    decisions = [decision for decision in read if decision is not None]
    if decisions and len(decisions) != len(read):
        raise Unclear("some of its lines are answers and some are not; answer one question a line.")
    return decisions


def _line(line: str, items: Sequence[InterruptItem]) -> Decision | None:
    found = _LINE.fullmatch(line)
    action = WORDS.get(found["word"].lower()) if found else None
    if found is None or action is None:
        return None
    named = [item for item in items if re.match(rf"{re.escape(item.id)}(?=[\s:,.;]|$)", found["rest"])]
    if not named:
        return None
    item = max(named, key=lambda candidate: len(candidate.id))
    behind = found["rest"][len(item.id) :].strip(" \t:,.;")
    if action not in actions_of(item):
        raise Unclear(f"{item.id} does not take that; it takes {', '.join(_names(item))}.")
    if action == _APPROVE and behind:
        raise Unclear(f"an approval takes no conditions; say `approve {item.id}` alone, or reject it and say why.")
    if action == _RESPOND:
        if not behind:
            raise Unclear(f"the answer to {item.id} is empty.")
        return Decision(interrupt_id=item.id, action=action, response_json=_json(behind))
    return Decision(interrupt_id=item.id, action=action, comment=behind)


def _from_data(value: object, items: Sequence[InterruptItem]) -> list[Decision]:
    if not isinstance(value, list) or not value:
        raise Unclear('"decisions" must be a list with an entry for each question answered.')
    return [_entry(f"decisions[{number}]", entry, items) for number, entry in enumerate(value)]


def _entry(place: str, entry: object, items: Sequence[InterruptItem]) -> Decision:
    if not isinstance(entry, dict):
        raise Unclear(f"{place} must be an object with interrupt_id and action.")
    if unknown := sorted(set(entry) - _KEYS):
        raise Unclear(f"{place} has {', '.join(unknown)}; there are {', '.join(sorted(_KEYS))}.")
    texts = {name: entry.get(name, "") for name in _TEXTS}
    if wrong := [name for name, text in texts.items() if not isinstance(text, str)]:
        raise Unclear(f"{place}.{wrong[0]} must be text.")
    if texts["interrupt_id"] not in {item.id for item in items}:
        raise Unclear(f"{place}.interrupt_id must be one of {', '.join(item.id for item in items)}.")
    action, scope = entry.get("action"), entry.get("remember", "call")
    if not isinstance(action, str) or action not in ACTIONS:
        raise Unclear(f"{place}.action must be one of {', '.join(ACTIONS)}.")
    if not isinstance(scope, str) or scope not in SCOPES:
        raise Unclear(f"{place}.remember must be one of {', '.join(SCOPES)}.")
    for name in ("args", "response"):
        if name in entry:
            if texts[f"{name}_json"]:
                raise Unclear(f"{place} has {name} and {name}_json; give one of them.")
            texts[f"{name}_json"] = _json(entry[name])
    decision = Decision(action=ACTIONS[action], **texts)
    if "remember" in entry:
        decision.remember = SCOPES[scope]
    return decision


def _each_once(decisions: list[Decision]) -> list[Decision]:
    ids = [decision.interrupt_id for decision in decisions]
    if twice := sorted({each for each in ids if ids.count(each) > 1}):
        raise Unclear(f"{', '.join(twice)} has two answers.")
    return decisions


def _names(item: InterruptItem) -> list[str]:
    allowed = actions_of(item)
    return [name for name, action in ACTIONS.items() if action in allowed]


def _json(value: object) -> str:
    """Return JSON text, always the same for a message, because the engine compares what is sent twice."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)

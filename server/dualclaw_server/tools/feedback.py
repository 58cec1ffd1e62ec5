"""The feedback tool: a model that lacks something only a person knows asks, and goes on with the answer.

The question parks the run. It is answered by Resume (RESPOND, or SKIP), or by the next message of the conversation.
The answer is the call's result; the tool is not run again for it, so nothing it did could be done twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dualclaw.events import canonical_json
from dualclaw_server.engine.outcome import Ask, Suspend
from dualclaw_server.engine.texts import Locale
from dualclaw_server.engine.tool import Tool, ToolRaised

NAME = "ask_user"
MAX_QUESTION = 4_000
"""Characters of a question with its choices."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """What the model is told of the tool."""

    description: str
    question: str
    choices: str
    only_choices: str
    empty: str
    too_long: str


_TEXTS: Mapping[Locale, _Texts] = MappingProxyType(
    {
        "en": _Texts(
            description="Ask the user a question and wait for the answer. Use it when you cannot go on without "
            "something only the user knows or may decide; ask one thing at a time.",
            question="The question, with everything the user needs to answer it.",
            choices="Answers to choose from, if there are such; the user may give another one.",
            only_choices="True: only one of the choices is an answer.",
            empty="the question is empty; ask something",
            too_long="the question and its choices have {count} characters, more than {limit}",
        ),
        "zh": _Texts(
            description="向用户提问并等待回答。仅当缺少只有用户知道或有权决定的信息而无法继续时使用；每次只问一件事。",
            question="问题，包含用户回答所需的全部信息。",
            choices="可供选择的答案（如有）；用户也可以给出其他答案。",
            only_choices="为 true 时，只能选择其中之一。",
            empty="问题为空，请提出具体问题",
            too_long="问题及选项共 {count} 个字符，超过 {limit} 个",
        ),
    }
)


def feedback_tool(locale: Locale = "en", *, name: str = NAME) -> Tool:
    """Return the tool by which a model asks the user; ``locale`` is the language the model is told in."""
    texts = _TEXTS[locale]

    async def ask(question: str, choices: list[str] | None = None, only_choices: bool = False) -> None:
        offered = list(dict.fromkeys(choice.strip() for choice in choices or () if choice.strip()))
        prompt = "\n".join([question.strip(), *(f"{number}. {choice}" for number, choice in enumerate(offered, 1))])
        if not question.strip():
            raise ToolRaised(texts.empty)
        if len(prompt) > MAX_QUESTION:
            raise ToolRaised(texts.too_long.format(count=len(prompt), limit=MAX_QUESTION))
        raise Suspend(Ask(prompt, kind="question", response_schema=_schema(offered, only=only_choices)))

    parameters = {
        "type": "object",
        "properties": {
            "question": {"type": "string", "description": texts.question},
            "choices": {"type": "array", "items": {"type": "string"}, "description": texts.choices},
            "only_choices": {"type": "boolean", "description": texts.only_choices},
        },
        "required": ["question"],
        "additionalProperties": False,
    }
    return Tool(name, texts.description, parameters, ask, effect="read")


def _schema(choices: list[str], *, only: bool) -> str:
    """Return what an answer must be; with choices that are mere offers, any text, the offers named for pages."""
    if not choices:
        return ""
    offered = {"type": "string", "enum": choices}
    return canonical_json(offered if only else {"anyOf": [offered, {"type": "string"}]})

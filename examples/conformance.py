"""The agent that the conformance kit talks to: deterministic, offline, with one scenario for every rule.

    DUALCLAW_AGENTS=examples.conformance:AGENTS dualclaw-server

The user's message names the scenario, ``conformance: NAME``. A server in another language offers the same agent, by
the name ``conformance``, however it makes it; what the kit relies on is this table and nothing of how it is done here.

| scenario | the run |
| --- | --- |
| ``text`` | one block of reasoning, then the answer "Hello 你好 🙂"; 10 tokens in, 5 out; FINISHED |
| ``tool`` | one message calls ``look`` (ok), an ``mcp`` tool (ok) and ``fails`` (fail) side by side; then an answer |
| ``args`` | calls ``look`` with nested arguments, big integers, floats and escapes; then an answer |
| ``approval`` | calls ``pay``, which needs approval; approved, its result is the answer; rejected, an answer says so |
| ``approvals`` | one message calls ``pay`` twice, and ``look`` beside them; as above |
| ``question`` | calls ``ask_user``; the response is repeated in the answer |
| ``rewind`` | some text, which is then withdrawn by a ``rewind``, and another answer |
| ``error`` | some text, then the model fails for good: ``error`` with reason model.bad_response |
| ``slow`` | the words "000 " to "199 ", one every 50 ms: time to cancel, to leave, to attach, to kill |
| ``steady`` | the words "000 " to "119 ", one every 250 ms: time enough for what happens after somebody left |
| ``long`` | the words "000 " to "1999 " without a pause |
| ``loop`` | calls ``look`` for ever: a limit ends it, with a last answer |
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.retry import RetryPolicy
from dualclaw_server.engine.tool import ToolRaised, tool
from dualclaw_server.interceptors import HitlInterceptor, Policy
from dualclaw_server.models import RouterModel, ScriptedModel
from dualclaw_server.tools.feedback import feedback_tool

Item = Mapping[str, object]


@tool(effect="read", timeout=5)
async def look(what: str, details: dict[str, object] | None = None) -> str:
    """Look something up; answers with what it was asked."""
    return f"seen: {what}"


@tool(kind="mcp", effect="read", timeout=5)
async def fetch(what: str) -> str:
    """Fetch something from a server that is not there; answers with what it was asked."""
    return f"fetched: {what}"


@tool(effect="read", timeout=5)
async def fails() -> str:
    """Fail, always."""
    raise ToolRaised("it always fails")


@tool(effect="once", timeout=5)
async def pay(to: str, amount: int) -> str:
    """Pay nobody anything; needs approval."""
    return f"paid {amount} to {to}"


def turn(scenario: str, step: int, *say: Item, result: str = "") -> dict[str, object]:
    """Return what the model says in one step of a scenario, if its newest tool result fits."""
    when: dict[str, object] = {"user": rf"^conformance: {scenario}\b", "step": step}
    return {"when": when | ({"tool_result": result} if result else {}), "say": list(say)}


def words(count: int, delay: float = 0) -> Item:
    """Return numbers as text, one delta each."""
    text = "".join(f"{number:03} " for number in range(count))
    return {"text": text, "chunk": 4, "delay": delay} if delay else {"text": text, "chunk": 64}


def pays(to: str) -> Item:
    """Return a call that needs approval."""
    return {"call": "pay", "args": {"to": to, "amount": 5}, "id": f"pay-{to}"}


ARGS = {
    "what": 'quote " slash \\ tab \t 你好 🙂 \u2028',
    "details": {"id": 12345678901234567890, "half": 0.5, "big": 1e16, "tiny": 1e-7, "none": None, "deep": [[{}], []]},
}
USAGE: Item = {"usage": {"input_tokens": 10, "output_tokens": 5}}
LOOK: Item = {"call": "look", "args": {"what": "it"}, "id": "look-1"}
FETCH: Item = {"call": "fetch", "args": {"what": "it"}, "id": "fetch-1"}
REFUSED = "(?i)reject|skip|refus|not run"

SCRIPT: Sequence[dict[str, object]] = (
    turn("text", 0, {"reasoning": "A greeting.", "chunk": 4}, {"text": "Hello 你好 🙂", "chunk": 2}, USAGE),
    turn("tool", 0, LOOK, FETCH, {"call": "fails", "id": "fails-1"}),
    turn("tool", 1, {"text": "Two of three went well.", "chunk": 5}),
    turn("args", 0, {"call": "look", "args": ARGS, "id": "look-1"}),
    turn("args", 1, {"text": "Seen.", "chunk": 2}),
    turn("approvals", 0, LOOK, pays("a"), pays("b")),
    turn("approvals", 1, {"text": "All is decided.", "chunk": 5}),
    turn("approval", 0, {"text": "One moment. "}, pays("a")),
    turn("approval", 1, {"text": "It was refused.", "chunk": 5}, result=REFUSED),
    turn("approval", 1, {"text": "Done: {{result}}.", "chunk": 5}),
    turn("question", 0, {"call": "ask_user", "args": {"question": "Which colour?"}, "id": "ask-1"}),
    turn("question", 1, {"text": "You said: {{result}}", "chunk": 5}),
    turn("rewind", 0, {"text": "This is wrong. ", "chunk": 5}, {"fail": "MODEL_STREAM_BROKEN", "retryable": False}),
    turn("error", 0, {"text": "So far ", "chunk": 4}, {"fail": "MODEL_BAD_RESPONSE", "message": "It fails for good."}),
    turn("slow", 0, words(200, delay=0.05)),
    turn("steady", 0, words(120, delay=0.25)),
    turn("long", 0, words(2000)),
    {"when": {"user": "^conformance: loop", "tools": True}, "say": [{"call": "look", "args": {"what": "more"}}]},
    {"when": {"user": "^conformance: loop"}, "say": [{"text": "That was enough."}]},
    {"when": {}, "say": [{"text": "Say `conformance: NAME`; the scenarios are in examples/conformance.py."}]},
)
SECOND: Sequence[dict[str, object]] = (
    turn("rewind", 0, {"text": "This is right.", "chunk": 5}),
    turn("error", 0, {"text": "So far ", "chunk": 4}, {"fail": "MODEL_BAD_RESPONSE", "message": "It fails for good."}),
)


def scripted(name: str, turns: Sequence[dict[str, object]]) -> ScriptedModel:
    """Return a model that plays these turns."""
    return ScriptedModel.parse(json.dumps({"name": name, "turns": turns}))


AGENT = Agent(
    "conformance",
    description="Plays the scenarios of the conformance kit.",
    tools=[look, replace(fetch, server="conformance"), fails, pay, feedback_tool()],
    models=[RouterModel([scripted("first", SCRIPT), scripted("second", SECOND)], breaker=None, name="conformance")],
    interceptors=[HitlInterceptor([Policy("pay")])],
    retry=RetryPolicy(attempts=1),
    limits=Limits(max_steps=5),
)
AGENTS = (AGENT,)

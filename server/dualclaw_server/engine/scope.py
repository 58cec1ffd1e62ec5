"""A scope: one agent at work within a segment, and everything its strategy can do.

``reason`` and ``act`` are what strategies call. The agent at the root of a run speaks to the client; a sub-agent
works for a call of the agent above it, shows its steps beside that call's and speaks to it alone. Rules:

- The shape (instructions, tools, model, limits) is made anew for every segment by ``before_agent``; the state lives
  in the trace. So a resumed run may meet other tools: a call whose tool is gone fails with a clear observation.
- Interceptors are frozen when the scope is opened. Their end hooks run whatever ends it.
- Where an outcome parks the run, the checkpoint says where to go on: before the model call, at the review of its
  answer, or in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

from dualclaw import ContentPart, InterruptKind, Message, Role, StepKind, StopReason, ToolCall, Usage
from dualclaw.errors import EngineError
from dualclaw.json_text import canonical_args
from dualclaw_server.engine import questions
from dualclaw_server.engine.act import Batch, announce, thought
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.chain import Chain
from dualclaw_server.engine.checkpoint import CallPhase, Question, Stage
from dualclaw_server.engine.handoff import transfer_tool
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.interceptor import ModelCall, Prompt, RunConfig
from dualclaw_server.engine.model import ChatModel, ModelOptions, ModelRequest, ModelResponse
from dualclaw_server.engine.outcome import Ask, End, Fail, Outcome, Replace, Suspend
from dualclaw_server.engine.parked import Parked
from dualclaw_server.engine.reason import Answer
from dualclaw_server.engine.segment import Segment
from dualclaw_server.engine.strategy import BringsTools, Chat, ReAct, Strategy
from dualclaw_server.engine.texts import Texts
from dualclaw_server.engine.tool import KINDS, Tool
from dualclaw_server.engine.trace import Trace


class Scope:
    """One agent in one segment. Made by ``open``."""

    def __init__(self, segment: Segment, agent: Agent, trace: Trace, chain: Chain, config: RunConfig) -> None:
        self.segment = segment
        self.agent = agent
        self.trace = trace
        self.chain = chain
        self.config = config
        self.model: ChatModel = config.model
        self.limits: Limits = config.limits
        self.strategy: Strategy = config.strategy or (ReAct() if config.tools else Chat())
        brought = tuple(self.strategy.tools) if isinstance(self.strategy, BringsTools) else ()
        self.tools: tuple[Tool, ...] = (*config.tools, *brought)
        self._bound: dict[tuple[str, ...], ChatModel] = {}
        trace.context_window = self.model.traits.context_window
        trace.services = self
        trace.checkpoint.strategy = self.strategy.name

    @classmethod
    async def open(cls, segment: Segment, agent: Agent, trace: Trace) -> Scope:
        """Have every interceptor shape the run.

        Raises:
            EngineError: an interceptor failed, or the shape it made cannot be used.
        """
        switches = await segment.switches(agent)
        chain = Chain.of(agent.interceptors, switches)
        limits = agent.limits
        chosen = trace.options.max_steps
        if chosen and trace.parent is None:
            limits = replace(limits, max_steps=min(chosen, limits.max_steps))
        tools = agent.all_tools
        if agent.transfer_to:
            tools = (*tools, transfer_tool(agent.transfer_to))
        config = RunConfig(agent.instructions, tools, segment.model_of(agent, trace), limits, agent.strategy)
        config = await chain.before_agent(trace, config)
        names = [tool.name for tool in config.tools]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise EngineError("INTERNAL", f"Agent {agent.name} was given several tools named {', '.join(repeated)}.")
        return cls(segment, agent, trace, chain, config)

    @classmethod
    def bare(cls, segment: Segment, agent: Agent, trace: Trace) -> Scope:
        """Return a scope that nobody has shaped and nothing is run in; it can only close what is open."""
        config = RunConfig(
            agent.instructions, agent.all_tools, segment.model_of(agent, trace), agent.limits, agent.strategy
        )
        return cls(segment, agent, trace, Chain.of(agent.interceptors, {}), config)

    @property
    def texts(self) -> Texts:
        """The engine's words in the agent's language."""
        return self.agent.texts

    @property
    def at_root(self) -> bool:
        """True for the agent that speaks to the client."""
        return self.trace.parent is None

    @cached_property
    def tools_by_name(self) -> Mapping[str, Tool]:
        """The tools of this segment, by name."""
        return {tool.name: tool for tool in self.tools}

    async def run(self) -> StopReason.ValueType:
        """Have the strategy go on from the checkpoint. Raises Outcome: Parked, Transferred, End or Fail."""
        try:
            self.obey(await self.chain.agent_start(self.trace))
            return await self.strategy.run(self)
        finally:
            await self.chain.agent_end(self.trace)

    # What strategies call

    async def reason(self, *, tools: bool, extra_instructions: str = "", options: ModelOptions | None = None) -> bool:
        """Call the model, show its answer as it comes, save it. Returns True when it asks for calls.

        Without ``tools`` it can ask for none: calls it invents are left out.

        Raises:
            ModelError: it gave no answer, after every retry.
            Outcome: an interceptor wants something else.
        """
        trace, checkpoint = self.trace, self.trace.checkpoint
        if checkpoint.stage == Stage.STAGE_REVIEW:
            return await self._review_again()
        self.segment.flush()
        instructions = "\n\n".join(text for text in (self.config.instructions, extra_instructions) if text)
        prompt = Prompt(trace.context(), instructions, list(self.tools) if tools else [], options or ModelOptions())
        outcome = await self.chain.reason_start(trace, prompt)
        if isinstance(outcome, Replace) and isinstance(outcome.value, Prompt):
            prompt = outcome.value
        else:
            self.obey(outcome)
        began = time.monotonic()
        response = await Answer(self, prompt).run()
        tools = tools and prompt.options.tool_choice != "none"
        message, bad_arguments = self._adopt(response, tools=tools)
        checkpoint.model_calls += 1
        trace.add_usage(response.usage)
        outcome = await self.chain.reason_end(trace, response, message, time.monotonic() - began)
        if isinstance(outcome, Replace) and isinstance(outcome.value, Message):
            message = self._replaced(message, outcome.value)
            outcome = None
        asks_for_calls = self._settle(message, bad_arguments)
        if isinstance(outcome, Suspend):
            checkpoint.stage = Stage.STAGE_REVIEW
        self.obey(outcome)
        if asks_for_calls:
            self.segment.save()
        return asks_for_calls

    async def act(self) -> bool:
        """Run the calls of the batch. Returns True when one of them is the answer (return_direct).

        Raises Outcome, see ``act.Batch.run``.
        """
        direct = await Batch(self).run()
        if not direct:
            return False
        self.say(direct)
        return True

    async def last_answer(self) -> None:
        """Make the one tool-less call that gives an answer after the last step; without text, say so."""
        before = len(self.said())
        await self.reason(tools=False, extra_instructions=self.texts.last_answer)
        if not self.said()[before:].strip():
            self.say(self.texts.step_limit)

    def over_budget(self) -> str:
        """Return why no further call may run, for people; empty while there is budget."""
        checkpoint = self.trace.checkpoint
        if self.trace.tokens > self.limits.max_tokens:
            return self.texts.budget_tokens
        waiting = sum(state.phase == CallPhase.CALL_PHASE_WAITING for state in checkpoint.calls)
        if checkpoint.tool_calls + waiting > self.limits.max_tool_calls:
            return self.texts.budget_tool_calls
        return ""

    def skip_calls(self, reason: str) -> None:
        """Give every open call a result that says it was not run, and close the turn with ``reason``."""
        Batch(self).close_open()
        self.say(reason)

    def close_calls(self, text: str = "") -> None:
        """Give every open call a result that says it was not run."""
        Batch(self).close_open(text)

    def say(self, text: str) -> None:
        """Add words of the agent's own to its answer, as a message of the conversation."""
        if self.at_root:
            self.segment.show(text)
        message_id = self.segment.close_turn(self.trace, text)
        if self.at_root:
            self.segment.message_id = message_id

    def said(self) -> str:
        """Return the agent's answer so far; at the root that of this segment."""
        if self.at_root:
            return self.segment.writer.shown()
        written = (m for m in self.trace.own_messages() if m.role == Role.ROLE_ASSISTANT)
        return "\n\n".join(filter(None, map(_text_in, written)))

    # What interceptors and tools reach

    async def ask(self, request: ModelRequest, model: ChatModel | None) -> ModelResponse:
        """Make a model call beside the conversation."""
        chosen = model or self.model

        async def call_next(call: ModelCall) -> ModelResponse:
            return await chosen.generate(call.request)

        response = await self.chain.call(call_next)(ModelCall(self.trace, chosen.name, request, 1))
        self.trace.add_usage(response.usage)
        return response

    async def recall(self, name: str) -> bytes | None:
        """Return a value kept for the tenant."""
        return await self.segment.recall(name)

    async def keep(self, name: str, value: bytes) -> None:
        """Keep a value for the tenant."""
        await self.segment.keep_value(name, value)

    # People

    def ask_people(self, ask: Ask, asked_by: str, call: Call | None) -> Question:
        """Put a question to people; the step of the call says so. Park the run once everything is asked."""
        shown = self.shown_args(call) if call is not None else ""
        question = questions.record(self.trace, ask, asked_by, call, shown)
        if call is not None:
            announce(self, call, questions.waiting_diagnosis(question.item, self.texts))
        return question

    def ask_again(self, before: Question, call: Call) -> None:
        """Ask the same about a call whose arguments changed since it was answered."""
        approval = before.item.kind == InterruptKind.INTERRUPT_KIND_APPROVAL
        asked_by, _, key = before.asked_by.partition("/")
        kind: Literal["approval", "question"] = "approval" if approval else "question"
        ask = Ask(before.item.prompt, kind, reject_ends_run=before.reject_ends_run, key=key)
        question = self.ask_people(ask, asked_by, call)
        question.item.ClearField("allowed_actions")
        question.item.allowed_actions.extend(before.item.allowed_actions)

    def shown_args(self, call: Call) -> str:
        """Return a call's arguments as people may see them, canonical."""
        return canonical_args(self.chain.mask(dict(call.args)))

    def obey(self, outcome: Outcome | None) -> None:
        """Do what an outcome wants, where that can only be to stop. Raises Outcome, or EngineError INTERNAL."""
        match outcome:
            case None:
                return
            case Suspend():
                for ask in outcome.asks:
                    self.ask_people(ask, outcome.origin, None)
                raise Parked
            case End() | Fail():
                raise outcome
            case _:
                raise EngineError("INTERNAL", f"Interceptor {outcome.origin} wants to replace what cannot be.")

    # How it works

    async def _review_again(self) -> bool:
        """Go on at the review of an answer that was suspended."""
        trace, checkpoint = self.trace, self.trace.checkpoint
        written = (m for m in reversed(trace.own_messages()) if m.role == Role.ROLE_ASSISTANT)
        message = next(written, Message())
        outcome = await self.chain.reason_end(trace, ModelResponse(message, "stop", Usage()), message, 0.0)
        self.obey(outcome)
        checkpoint.stage = Stage.STAGE_ACT if checkpoint.calls else Stage.STAGE_END
        return bool(checkpoint.calls)

    def bound(self, tools: Sequence[Tool]) -> ChatModel:
        """Return the model with these tools; made once per choice of them."""
        if not tools:
            return self.model
        names = tuple(tool.name for tool in tools)
        model = self._bound.get(names)
        if model is None:
            model = self._bound[names] = self.model.with_tools([tool.spec for tool in tools])
        return model

    def _adopt(self, response: ModelResponse, *, tools: bool) -> tuple[Message, dict[str, str]]:
        """Make the model's message one of the conversation: ids, author, time; call ids new to the conversation.

        Returns it with the raw arguments of the calls whose arguments are no JSON object.
        """
        message = Message(id=new_id(), role=Role.ROLE_ASSISTANT, author=self.agent.name)
        message.create_time.GetCurrentTime()
        used = set(self.trace.call_ids()) if tools else set()
        bad_arguments: dict[str, str] = {}
        for part in response.message.parts:
            if part.WhichOneof("part") != "tool_call":
                message.parts.append(part)
            elif tools:
                call = self._adopt_call(part.tool_call, used)
                message.parts.append(ContentPart(tool_call=call))
                if part.tool_call.id in response.bad_arguments:
                    bad_arguments[call.id] = response.bad_arguments[part.tool_call.id]
        return message, bad_arguments

    def _adopt_call(self, call: ToolCall, used: set[str]) -> ToolCall:
        adopted = ToolCall()
        adopted.CopyFrom(call)
        if not call.id or call.id in used:
            adopted.id = f"call_{new_id()}"
        used.add(adopted.id)
        tool = self.tools_by_name.get(call.name)
        adopted.kind = KINDS[tool.kind] if tool else StepKind.STEP_KIND_SKILL
        adopted.server = tool.server if tool else ""
        return adopted

    def _replaced(self, message: Message, wanted: Message) -> Message:
        """Return the message an interceptor put in place of the model's, with the identity of the latter."""
        made = Message()
        made.CopyFrom(wanted)
        made.id, made.role, made.author = message.id, message.role, message.author
        made.create_time.CopyFrom(message.create_time)
        if self.at_root:
            self.segment.replace_answer(_text_in(made))
        return made

    def _settle(self, message: Message, bad_arguments: Mapping[str, str]) -> bool:
        """Make the answer part of the saved state; returns whether it asks for calls."""
        trace, checkpoint, segment = self.trace, self.trace.checkpoint, self.segment
        if self.at_root:
            segment.answered(message.id if message.parts else "")
        for part in message.parts:
            if part.WhichOneof("part") == "reasoning" and part.reasoning.text:
                segment.writer.event(thought(self, part.reasoning.text, trace.next_index()))
        if message.parts:
            segment.put(trace.put(trace.reserve(), message))
        calls = [part.tool_call for part in message.parts if part.WhichOneof("part") == "tool_call"]
        checkpoint.stage = Stage.STAGE_ACT if calls else Stage.STAGE_END
        first = trace.reserve(len(calls))
        for offset, call in enumerate(calls):
            checkpoint.calls.add(
                call=call,
                phase=CallPhase.CALL_PHASE_WAITING,
                index=trace.next_index(),
                position=first + offset,
                bad_arguments=bad_arguments.get(call.id, ""),
            )
        return bool(calls)


def _text_in(message: Message) -> str:
    return "".join(part.text for part in message.parts if part.WhichOneof("part") == "text")

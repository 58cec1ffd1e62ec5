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

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from dualclaw import Message, StopReason
from dualclaw.errors import EngineError, diagnosis_code
from dualclaw.json_text import canonical_args
from dualclaw_server.engine import questions
from dualclaw_server.engine.act import Batch
from dualclaw_server.engine.adopt import copy_of
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.chain import Chain
from dualclaw_server.engine.checkpoint import CallPhase, Question, Stage
from dualclaw_server.engine.handoff import transfer_tool
from dualclaw_server.engine.interceptor import ModelCall, Prompt, RunConfig
from dualclaw_server.engine.model import ChatModel, ModelError, ModelOptions, ModelRequest, ModelResponse, ToolSpec
from dualclaw_server.engine.node import NodeRegistry
from dualclaw_server.engine.outcome import Ask, End, Fail, Outcome, Replace, Suspend, stop_name
from dualclaw_server.engine.parked import Parked, Transferred
from dualclaw_server.engine.reason import Answer
from dualclaw_server.engine.segment import Segment
from dualclaw_server.engine.settle import adopt, review_again, said_in, settle, taken
from dualclaw_server.engine.steps import announce
from dualclaw_server.engine.store import StoreError
from dualclaw_server.engine.strategy import Chat, ReAct, Strategy, tools_of
from dualclaw_server.engine.texts import Texts
from dualclaw_server.engine.tool import Tool
from dualclaw_server.engine.trace import Trace


class Scope:
    """One agent in one segment. Made by ``open``."""

    def __init__(
        self,
        segment: Segment,
        agent: Agent,
        trace: Trace,
        chain: Chain,
        config: RunConfig,
        nodes: NodeRegistry | None = None,
    ) -> None:
        self.segment = segment
        self.agent = agent
        self.trace = trace
        self.chain = chain
        self.config = config
        self.nodes = nodes or agent.nodes
        """The agent's graph, as its place below other agents has it."""
        self.model: ChatModel = config.model
        self.limits: Limits = config.limits
        self.strategy: Strategy = config.strategy or (ReAct() if config.tools else Chat())
        self.tools: tuple[Tool, ...] = (*config.tools, *tools_of(self.strategy, agent.texts))
        self._bound: dict[tuple[ToolSpec, ...], ChatModel] = {}
        trace.context_window = self.model.traits.context_window
        trace.limits = self.limits
        trace.services = self
        trace.mask = chain.mask
        trace.checkpoint.strategy = self.strategy.name

    @classmethod
    async def open(cls, segment: Segment, agent: Agent, trace: Trace, nodes: NodeRegistry | None = None) -> Scope:
        """Have every interceptor shape the run.

        Raises:
            EngineError: an interceptor failed, or the shape it made cannot be used.
            Outcome: Parked, End or Fail, as an interceptor wants it.
        """
        switches = await segment.switches(agent)
        above = trace.parent.services if trace.parent is not None else None
        chain = Chain.of(agent.interceptors, switches, above=above.chain if isinstance(above, Scope) else None)
        limits = agent.limits
        chosen = trace.options.max_steps
        if chosen and trace.parent is None:
            limits = replace(limits, max_steps=min(chosen, limits.max_steps))
        tools = agent.all_tools
        if agent.transfer_to and trace.parent is None:
            tools = (*tools, transfer_tool(agent.transfer_to, agent.texts))
        plain = RunConfig(agent.instructions, tools, segment.model_of(agent, trace), limits, agent.strategy)
        scope = cls(segment, agent, trace, chain, plain, nodes)  # what interceptors reach meanwhile
        try:
            config = await chain.before_agent(trace, plain)
            if config is not plain:
                scope = cls(segment, agent, trace, chain, config, nodes)
        except Suspend as wanted:
            scope.obey(wanted)
        if len(scope.tools_by_name) < len(scope.tools):
            names = [tool.name for tool in scope.tools]
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise EngineError("INTERNAL", f"Agent {agent.name} was given several tools named {', '.join(repeated)}.")
        return scope

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
            stop_reason = await self._work()
        except asyncio.CancelledError:
            self.trace.ending = self.segment.stopping or "cancelled"
            await self.chain.agent_end(self.trace)
            raise
        except BaseException as error:
            self.trace.ending = _ending(error)
            self.obey(await self.chain.agent_end(self.trace))
            raise
        self.trace.ending = stop_name(stop_reason)
        self.obey(await self.chain.agent_end(self.trace))
        return stop_reason

    async def _work(self) -> StopReason.ValueType:
        try:
            self.obey(await self.chain.agent_start(self.trace))
            # a sub-agent that is through must never be run again, whatever is saved before its call's result is
            self.trace.checkpoint.stop_reason = stop_reason = await self.strategy.run(self)
            return stop_reason
        except Suspend as wanted:  # raised where nothing but the run itself can be asked about
            self.obey(wanted)
            raise

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
            return await review_again(self)
        self.segment.flush()
        instructions = "\n\n".join(text for text in (self.config.instructions, extra_instructions) if text)
        prompt = Prompt(self._context(), instructions, list(self.tools) if tools else [], options or ModelOptions())
        outcome = await self.chain.reason_start(trace, prompt)
        if isinstance(outcome, Replace) and isinstance(outcome.value, Prompt):
            prompt = outcome.value
        else:
            self.obey(outcome)
        began = time.monotonic()
        answer = Answer(self, prompt)
        response = await answer.run()
        tools = tools and answer.options.tool_choice != "none"
        message, bad_arguments = adopt(self, response.message, response.bad_arguments, tools=tools)
        identity = Message(id=message.id, create_time=message.create_time)
        checkpoint.model_calls += 1
        trace.root.checkpoint.recoveries = 0  # it got further, so it does not take every worker down
        trace.add_usage(response.usage)
        outcome = await self.chain.reason_end(trace, response, message, time.monotonic() - began)
        if self.chain:  # it may have been changed in place, or by whoever stands around the model
            outcome, changed = taken(outcome, message)
            message, bad_arguments = adopt(self, changed, bad_arguments, tools=tools, identity=identity)
        if self.at_root:  # what was shown was a preview
            self.segment.replace_answer(said_in(message))
        asks_for_calls = settle(self, message, bad_arguments)
        if isinstance(outcome, Suspend) and message.parts:  # nothing was said: there is nothing to review later
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
        line = [(trace, trace.limits) for trace in self.trace.line() if trace.limits is not None]
        if any(trace.tokens > limits.max_tokens for trace, limits in line):
            return self.texts.budget_tokens
        waiting = sum(state.phase == CallPhase.CALL_PHASE_WAITING for state in self.trace.checkpoint.calls)
        if any(trace.tool_calls + waiting > limits.max_tool_calls for trace, limits in line):
            return self.texts.budget_tool_calls
        return ""

    def count_call(self) -> bool:
        """Count a call of this agent, for those above it too; False: the limit of one of them is reached."""
        line = list(self.trace.line())
        if any(trace.limits is not None and trace.tool_calls >= trace.limits.max_tool_calls for trace in line):
            return False
        for trace in line:
            trace.checkpoint.tool_calls += 1
        return True

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
        return self.trace.said()

    # What interceptors and tools reach

    async def ask(self, request: ModelRequest, model: ChatModel | None) -> ModelResponse:
        """Make a model call beside the conversation."""
        chosen = model or self.model

        async def call_next(call: ModelCall) -> ModelResponse:
            self.segment.lease.check()
            return await chosen.generate(call.request)

        try:
            response = await self.chain.call(call_next)(ModelCall(self.trace, chosen.name, request, 1))
        except ModelError as error:
            if error.usage is not None:
                self.trace.add_usage(error.usage)
            raise
        self.trace.add_usage(response.usage)
        return response

    async def recall(self, name: str) -> bytes | None:
        """Return a value kept for the tenant."""
        return await self.segment.recall(name)

    async def keep(self, name: str, value: bytes) -> None:
        """Keep a value for the tenant."""
        await self.segment.keep_value(name, value)

    async def review_plan(self, steps: Sequence[str]) -> Sequence[str]:
        """Have ``on_plan`` of every interceptor see a plan. Raises Outcome."""
        outcome = await self.chain.plan(self.trace, steps)
        if isinstance(outcome, Replace) and isinstance(outcome.value, Sequence):
            return [str(step) for step in outcome.value]
        self.obey(outcome)
        return steps

    # People

    def ask_people(self, ask: Ask, asked_by: str, call: Call | None) -> Question:
        """Put a question to people; the step of the call says so. Park the run once everything is asked."""
        shown = self.shown_args(call) if call is not None else ""
        question, new = questions.record(self.trace, ask, asked_by, call, shown)
        if new:
            question.item.prompt = self.chain.mask(question.item.prompt)
            if call is not None:
                announce(self, call, questions.waiting_diagnosis(question.item, self.texts))
        return question

    def ask_again(self, before: Question, call: Call) -> None:
        """Ask the same about a call whose arguments changed since it was answered."""
        self.ask_people(questions.same_ask(before), before.asked_by.partition("/")[0], call)

    def shown_args(self, call: Call) -> str:
        """Return a call's arguments as people may see them, canonical."""
        if not self.chain.masks:
            return call.state.call.args_json
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

    def _context(self) -> list[Message]:
        """Return the messages for a prompt; copies where somebody might change them."""
        messages = self.trace.context()
        return [copy_of(message) for message in messages] if self.chain else messages

    def bound(self, tools: Sequence[Tool]) -> ChatModel:
        """Return the model with these tools; made once per choice of them."""
        if not tools:
            return self.model
        specs = tuple(tool.spec for tool in tools)
        model = self._bound.get(specs)
        if model is None:
            model = self._bound[specs] = self.model.with_tools(specs)
        return model


def _ending(error: BaseException) -> str:
    """Return how an agent ended that did not come to the end of its strategy."""
    match error:
        case Parked() | Suspend():
            return "interrupted"
        case Transferred():
            return "transferred"
        case End():
            return stop_name(error.stop_reason)
        case Fail():
            return diagnosis_code(error.error.reason)
        case EngineError():
            return diagnosis_code(error.reason)
        case StoreError():
            return "put_back"
        case _:
            return "internal"

"""Tools: functions a model may call, with a JSON schema taken from their signature.

Rules of a call, kept by ``Tool.call`` and ``act``:

- Arguments are validated against the schema before anything runs; what does not fit never reaches the function.
- ``async def`` runs on the event loop, plain ``def`` in a thread of its own: a hung one occupies no pool, and
  a daemon thread never keeps the process alive. Its result is abandoned when the run is stopped.
- Whatever a function raises fails its call and nothing else: a SystemExit would end the whole process.
- What a function returns becomes text (or parts) at this border; an object that is neither text nor JSON is
  an error of that call, not of a checkpoint written later.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import re
import threading
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import jsonschema
import msgspec
import referencing
import referencing.exceptions

from dualclaw import ContentPart, EffectClass, StepKind
from dualclaw.events import canonical_json, clean_text
from dualclaw_server.engine.model import ToolSpec

if typing.TYPE_CHECKING:
    from dualclaw_server.engine.interceptor import Handoff
    from dualclaw_server.engine.trace import Trace

DEFAULT_TIMEOUT = 60.0
_MAX_PROBLEM = 500
"""Characters of what is wrong with arguments."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

Effect = typing.Literal["read", "idempotent", "reconcile", "once"]
UnknownOutcome = typing.Literal["tell", "ask"]
Kind = typing.Literal["skill", "mcp", "agent", "kb", "media", "thinking"]
"""Kind of the steps it makes; "thinking" ones show their result as a thought, without a start."""

EFFECTS: Mapping[Effect, EffectClass.ValueType] = MappingProxyType(
    {
        "read": EffectClass.EFFECT_CLASS_READ,
        "idempotent": EffectClass.EFFECT_CLASS_IDEMPOTENT,
        "reconcile": EffectClass.EFFECT_CLASS_RECONCILE,
        "once": EffectClass.EFFECT_CLASS_ONCE,
    }
)
KINDS: Mapping[Kind, StepKind.ValueType] = MappingProxyType(
    {
        "thinking": StepKind.STEP_KIND_THINKING,
        "skill": StepKind.STEP_KIND_SKILL,
        "mcp": StepKind.STEP_KIND_MCP,
        "agent": StepKind.STEP_KIND_AGENT,
        "kb": StepKind.STEP_KIND_KB,
        "media": StepKind.STEP_KIND_MEDIA,
    }
)


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a call may know of its surroundings; a function that has a parameter of this type is given it."""

    tenant: str
    subject: str
    run_id: str
    conversation_id: str
    call_id: str
    idempotency_key: str
    """The same for every attempt at this call, also after a crash; hand it to services that honour one."""
    metadata: Mapping[str, str]
    """Of the run's request."""
    trace: Trace
    """The run at work: session values, who asked, what was used so far."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A result with more than text; ``parts`` hold text, images and files only."""

    parts: Sequence[ContentPart]
    handoff: Handoff | None = None
    """What it does beside being a result: another agent takes over, or the run ends."""


class ToolRaised(Exception):
    """A tool's own error, as text for the model. Raise it for a failure that needs no traceback in the log."""


class NotDone(ToolRaised):
    """The tool did nothing: whatever its effect class, the call may safely be made again."""


ToolFunction = Callable[..., object]
Lookup = Callable[[str], Awaitable[object | None]]


@dataclass(frozen=True)
class Tool:
    """A function a model may call. Usually made by ``@tool``.

    Raises ValueError when the name or the schema is unusable, naming what is wrong.
    """

    name: str
    """1 to 64 of letters, digits, ``_`` and ``-``, which is what every vendor takes."""
    description: str
    parameters: Mapping[str, object]
    """JSON schema of type object."""
    function: ToolFunction
    kind: Kind = "skill"
    server: str = ""
    effect: Effect = "once"
    """What may be done with a call whose outcome a crash has hidden; see the contract's EffectClass."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds."""
    return_direct: bool = False
    """True: its result is the answer."""
    lookup: Lookup | None = None
    """With effect "reconcile": given the idempotency key, returns the earlier result, or None if nothing happened."""
    unknown_outcome: UnknownOutcome = "tell"
    """What becomes of a call that may not run again and whose outcome a crash has hidden: "tell" the model, or "ask"
    people, for whom the run waits: they have it run again, say what came of it, or leave it unknown.
    """
    types: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Python type of each parameter, to convert to; a missing one is passed as plain JSON data."""
    context_parameter: str = ""
    """Name of the parameter that takes the ToolContext; empty: none does."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"tool name {self.name!r}: use 1 to 64 of letters, digits, _ and -")
        if self.effect == "reconcile" and self.lookup is None:
            raise ValueError(f"tool {self.name}: effect 'reconcile' needs a lookup")
        if self.unknown_outcome not in ("tell", "ask"):
            raise ValueError(f"tool {self.name}: unknown_outcome {self.unknown_outcome!r} must be 'tell' or 'ask'")
        if self.timeout <= 0:
            raise ValueError(f"tool {self.name}: timeout must be above 0 seconds, not {self.timeout}")
        try:
            jsonschema.Draft202012Validator.check_schema(self.parameters)
        except jsonschema.SchemaError as error:
            raise ValueError(f"tool {self.name}: its schema is no JSON schema: {error.message}") from None

    @cached_property
    def parameters_json(self) -> str:
        """The schema as JSON text."""
        return json.dumps(self.parameters, ensure_ascii=False)

    @cached_property
    def spec(self) -> ToolSpec:
        """The tool as a model sees it."""
        return ToolSpec(self.name, self.description, self.parameters_json)

    @cached_property
    def _validator(self) -> jsonschema.Draft202012Validator:
        # With no registry given, a reference to another document would be fetched from wherever it says.
        return jsonschema.Draft202012Validator(self.parameters, registry=referencing.Registry())

    @cached_property
    def is_async(self) -> bool:
        """True when it runs on the event loop and can really be cancelled."""
        return inspect.iscoroutinefunction(self.function)

    def problem(self, args: Mapping[str, object]) -> str:
        """Return what is wrong with the arguments, in one line that names the place; empty when they fit."""
        try:
            error = jsonschema.exceptions.best_match(self._validator.iter_errors(dict(args)))
        except (referencing.exceptions.Unresolvable, RecursionError) as unusable:
            return f"the schema of {self.name} cannot be used: {unusable}"[:_MAX_PROBLEM]
        if error is None:
            return self._unconvertible(args)
        place = "/".join(str(step) for step in error.absolute_path)
        message = error.message  # begins with the value itself, however long that is
        if len(message) > _MAX_PROBLEM:
            message = f"{message[: _MAX_PROBLEM // 2]} ... {message[-_MAX_PROBLEM // 2 :]}"
        return f"{place}: {message}" if place else message

    def _unconvertible(self, args: Mapping[str, object]) -> str:
        """Return what types say that the schema does not, such as the format of a date."""
        try:
            self._values(args)
        except (msgspec.ValidationError, ValueError) as error:
            return str(error)[:500]
        return ""

    def _values(self, args: Mapping[str, object]) -> dict[str, object]:
        return {
            name: msgspec.convert(value, self.types[name]) if name in self.types else value
            for name, value in args.items()
        }

    async def call(self, args: Mapping[str, object], context: ToolContext) -> ToolOutput:
        """Run it with valid arguments and return its result.

        Raises whatever the function raises, RuntimeError for what would end the process, and TypeError for a
        result that is neither text nor JSON.
        """
        values = self._values(args)
        if self.context_parameter:
            values[self.context_parameter] = context
        with contained():
            if self.is_async:
                result = await typing.cast("Awaitable[object]", self.function(**values))
            else:
                result = await _in_thread(self.function, values)
                if inspect.isawaitable(result):
                    result = await result
            handoff = result.handoff if isinstance(result, ToolOutput) else None
            return ToolOutput(as_parts(result), handoff)


@contextmanager
def contained(who: str = "the tool") -> Iterator[None]:
    """Make an error of what no error is: SystemExit, say, ends the whole process when a task raises it."""
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{who} raised {type(error).__name__}") from error


def as_parts(result: object) -> list[ContentPart]:
    """Return a function's result as content parts: text as it is, other data as canonical JSON, None as nothing."""
    if isinstance(result, ToolOutput):
        for part in result.parts:
            if not isinstance(part, ContentPart) or part.WhichOneof("part") not in ("text", "image", "file"):
                raise TypeError("parts of a ToolOutput are ContentParts with text, image or file")
        return list(result.parts)
    if result is None:
        return []
    if isinstance(result, str):
        return [ContentPart(text=clean_text(result))] if result else []
    return [ContentPart(text=canonical_json(msgspec.to_builtins(result, str_keys=True)))]


async def _in_thread(function: ToolFunction, values: Mapping[str, object]) -> object:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[object] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: object, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        elif isinstance(error, StopIteration):  # a future refuses it
            outcome.set_exception(RuntimeError("the tool raised StopIteration"))
        else:
            outcome.set_exception(error)

    def work() -> None:
        result: object = None
        error: BaseException | None = None
        try:
            result = context.run(function, **values)
        except BaseException as raised:  # handed to the waiting call
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=work, name=f"tool-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await outcome


@typing.overload
def tool(function: ToolFunction, /) -> Tool: ...
@typing.overload
def tool(
    *,
    name: str = "",
    kind: Kind = "skill",
    effect: Effect = "once",
    timeout: float = DEFAULT_TIMEOUT,
    return_direct: bool = False,
    lookup: Lookup | None = None,
    unknown_outcome: UnknownOutcome = "tell",
) -> Callable[[ToolFunction], Tool]: ...
def tool(
    function: ToolFunction | None = None,
    /,
    *,
    name: str = "",
    kind: Kind = "skill",
    effect: Effect = "once",
    timeout: float = DEFAULT_TIMEOUT,
    return_direct: bool = False,
    lookup: Lookup | None = None,
    unknown_outcome: UnknownOutcome = "tell",
) -> Tool | Callable[[ToolFunction], Tool]:
    """Make a Tool of a typed function: schema from its signature, texts from its docstring.

    The first paragraph of the docstring is the description; an ``Args:`` section describes parameters, a line
    ``name: text`` each. Every parameter needs a type that JSON can carry (text, numbers, lists, dicts,
    Literal, Optional, dataclasses, TypedDict); one of type ToolContext is filled in by the engine.
    Raises ValueError when the signature does not do.
    """

    def make(target: ToolFunction) -> Tool:
        made = _from_function(target, name or target.__name__, kind, effect, timeout, return_direct, lookup)
        return replace(made, unknown_outcome=unknown_outcome)

    return make if function is None else make(function)


def _from_function(
    function: ToolFunction,
    name: str,
    kind: Kind,
    effect: Effect,
    timeout: float,
    return_direct: bool,
    lookup: Lookup | None,
) -> Tool:
    description, notes = _read_docstring(function)
    hints = typing.get_type_hints(function, include_extras=True)
    types: dict[str, object] = {}
    defaults: dict[str, object] = {}
    required: list[str] = []
    context_parameter = ""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {name}: parameter {parameter.name} must be one a caller can name")
        if parameter.name not in hints:
            raise ValueError(f"tool {name}: parameter {parameter.name} needs a type")
        if hints[parameter.name] is ToolContext:
            context_parameter = parameter.name
            continue
        types[parameter.name] = hints[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            defaults[parameter.name] = parameter.default
    try:
        schemas, components = msgspec.json.schema_components(
            list(types.values()), ref_template="#/$defs/{name}", schema_hook=_anything
        )
    except TypeError as error:
        raise ValueError(f"tool {name}: {error}") from None
    properties: dict[str, object] = {}
    for parameter_name, schema in zip(types, schemas, strict=True):
        described: dict[str, object] = dict(schema)
        if parameter_name in notes:
            described["description"] = notes[parameter_name]
        if parameter_name in defaults:
            described["default"] = msgspec.to_builtins(defaults[parameter_name])
        properties[parameter_name] = described
    parameters: dict[str, object] = {"type": "object", "properties": properties, "required": required}
    parameters["additionalProperties"] = False
    if components:
        parameters["$defs"] = components
    return Tool(
        name=name,
        description=description,
        parameters=parameters,
        function=function,
        kind=kind,
        effect=effect,
        timeout=timeout,
        return_direct=return_direct,
        lookup=lookup,
        types=types,
        context_parameter=context_parameter,
    )


def _anything(found: type) -> dict[str, object]:
    """Return the schema of ``object``: any JSON value. Msgspec knows only Any by itself, and takes {} for none."""
    if found is object:
        return {"description": "Any JSON value."}
    raise NotImplementedError


def _read_docstring(function: ToolFunction) -> tuple[str, dict[str, str]]:
    """Return the text before ``Args:`` and the line of each parameter, continuation lines joined."""
    text = inspect.getdoc(function) or ""
    head, _, rest = text.partition("\nArgs:\n")
    notes: dict[str, str] = {}
    current = ""
    for line in rest.splitlines():
        if line.strip() and not line.startswith(" "):
            break
        start = re.match(r"    (\w+)(?: \([^)]*\))?: (.*)", line)
        if start:
            current = start[1]
            notes[current] = start[2].strip()
        elif current and line.strip():
            notes[current] += " " + line.strip()
    return " ".join(head.split()), notes

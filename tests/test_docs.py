"""README.md and docs/runtime.md, held to what they show: every block of Python runs, and does what the text says."""

import ast
import asyncio
import contextlib
import inspect
import io
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from google.protobuf import json_format

from dualclaw import ContentPart, EngineEvent, Message, ResumeRequest, Role, RunRequest, StopReason
from dualclaw.rules import check_stream
from dualclaw_clients.cli_parser import make_parser
from dualclaw_clients.engine_client import EngineClient
from dualclaw_server import interceptors
from dualclaw_server.app import Parts, engine_server
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.interceptor import DEPRECATED, HOOKS, Interceptor
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.servicers.access import anonymous_access
from dualclaw_server.settings import Settings
from dualclaw_server.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROOT = Path(__file__).resolve().parents[1]
README, RUNTIME = ROOT / "README.md", ROOT / "docs" / "runtime.md"
LONGEST = 200
"""Lines of a page that people read in one go."""
ADDRESS = "127.0.0.1:50051"


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def run_blocks(page: Path, sources: Sequence[str]) -> dict[str, object]:
    """Run blocks one after another, as one module; returns what they define."""
    names: dict[str, object] = {"__name__": f"{page.stem}_page"}
    for number, source in enumerate(sources, 1):
        exec(compile(source, f"{page.name}, block {number}", "exec", dont_inherit=True), names)  # noqa: S102
    return names


@pytest.fixture(scope="module")
def page() -> dict[str, object]:
    """What the blocks of docs/runtime.md define."""
    return run_blocks(RUNTIME, blocks(RUNTIME, "python"))


@pytest.fixture
def script() -> list[object]:
    """The turns of the model that docs/runtime.md writes down."""
    (text,) = blocks(RUNTIME, "json")
    return list(json.loads(text)["turns"])


@contextlib.asynccontextmanager
async def served(turns: Sequence[object], *agents: object) -> AsyncIterator[str]:
    """Serve agents by a written model on a free port; gives the address."""
    model = ScriptedModel.parse(json.dumps({"name": "script", "turns": list(turns)}))
    parts = Parts(MemoryStore(), model, cast("Sequence[Agent]", agents), anonymous_access(loopback=True))
    settings = Settings(listen="127.0.0.1:0", store="memory:", grace=0.0)
    async with engine_server(settings, parts) as server:
        yield server.address


async def ask(address: str, text: str = "go", agent: str = "") -> list[EngineEvent]:
    """Ask and return the events of the run's first segment."""
    message = Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)])
    request = RunRequest(agent=agent, message=message)
    async with asyncio.timeout(60), EngineClient(address) as engine, engine.run(request) as stream:
        events = [event async for event in stream]
    assert check_stream(events) == []
    return events


def pays(step: int, *names: str) -> dict[str, object]:
    calls = [{"call": "pay", "id": name, "args": {"to": name, "amount": 1}} for name in names]
    return {"when": {"step": step}, "say": calls}


# README.md


async def test_the_readmes_client_prints_a_run() -> None:
    """The script of the README, pointed at an engine that runs, prints seq and kind of each event."""
    (source,) = [block for block in blocks(README, "python") if "EngineClient" in block]
    assert ADDRESS in source
    printed = io.StringIO()
    async with served([{"say": [{"text": "391"}]}], Agent("a")) as address:
        with contextlib.redirect_stdout(printed):
            await asyncio.to_thread(run_blocks, README, [source.replace(ADDRESS, address)])
    assert printed.getvalue().split("\n") == ["1 delta", "2 done", ""]


def readme_agent(name: str) -> object:
    """Return the agent of a block of the README by its name."""
    (source,) = [block for block in blocks(README, "python") if f'"{name}"' in block]
    return run_blocks(README, [source])["AGENT"]


async def test_the_readmes_agent_answers_by_its_script() -> None:
    """The agent of the README with the script beside it says what is in stock."""
    text = next(block for block in blocks(README, "") if block.startswith("echo '{"))
    turns = json.loads(text.partition("'")[2].partition("'")[0])["turns"]
    async with served(turns, readme_agent("shop")) as address:
        events = await ask(address)
    assert events[-1].done.content == "There are 3 left."


async def test_the_readmes_agent_waits_for_a_person() -> None:
    """The one with interceptors asks before it pays anything back."""
    turns = [{"say": [{"call": "refund", "args": {"order": "A7", "amount": 5}}]}]
    async with served(turns, readme_agent("support")) as address:
        events = await ask(address)
    assert [item.prompt for item in events[-2].interrupt.items] == ["Run refund?"]


def test_every_block_of_python_in_the_readme_is_tried_here() -> None:
    """Who adds one adds what shows that it works."""
    assert len(blocks(README, "python")) == 3


# docs/runtime.md


def test_the_page_can_be_read_in_one_go() -> None:
    """Users read it; details are in the modules."""
    assert len(RUNTIME.read_text("utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize("name", ["README.md", "docs/runtime.md", "docs/parity.md"])
def test_what_a_page_points_at_is_there(name: str) -> None:
    """Files that are linked or named in a page exist."""
    page = ROOT / name
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = [page.parent / link for link in re.findall(r"\]\((?!http)([^)#]+)", text)]
    links += [ROOT / path for path in re.findall(r"`((?:examples|tests|docs)/[\w./]+)`", text)]
    assert [link.name for link in links if not link.exists()] == []


async def test_the_agent_in_ten_lines_pays(page: Mapping[str, object], script: Sequence[object]) -> None:
    """It is served by its script, and its tool does its work."""
    async with served(script, page["AGENT"]) as address:
        done = (await ask(address))[-1].done
    assert (done.content, done.stop_reason) == ("paid 120 to anna", StopReason.STOP_REASON_FINISHED)


def test_the_table_of_hooks_has_them_all() -> None:
    """Each hook of the class with its parameters, and none that is not there."""
    text = RUNTIME.read_text("utf-8").partition("## Interceptors")[2].partition("- **Outcomes")[0]
    shown = dict(re.findall(r"`((?:before|on|intercept)_\w+)(?:\((.*?)\))?`", text))
    assert set(shown) == set(HOOKS) - set(DEPRECATED)
    for name, parameters in shown.items():
        if parameters:
            there = list(inspect.signature(getattr(Interceptor, name)).parameters)[1:]
            assert parameters.split(", ") == there, name


async def test_the_example_of_an_interceptor_refuses_the_fourth_payment(page: Mapping[str, object]) -> None:
    """Three are made, over several answers, the fourth is an error the model is told of; another run begins anew."""
    kind = cast("type[Interceptor]", page["PaymentsInterceptor"])
    agent = replace(cast("Agent", page["AGENT"]), interceptors=[kind()])
    turns = [pays(0, "a", "b"), pays(1, "c", "d"), {"when": {"step": 2}, "say": [{"text": "{{result}}"}]}]
    async with served(turns, agent) as address:
        for _ in range(2):
            done = (await ask(address))[-1].done
            assert [step.result for step in done.process_steps[:3]] == ["paid 1 to a", "paid 1 to b", "paid 1 to c"]
            assert done.content == "No more than three payments in a run."


def test_the_table_of_what_ships_has_the_defaults_there_are() -> None:
    """Every interceptor of the package is in it, and every default it names is that of the class."""
    text = RUNTIME.read_text("utf-8").partition("## What ships")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines() if line.startswith("| `")]
    named = {cells[0].strip("`"): cells[1] for cells in rows}
    assert set(named) == {name for name in interceptors.__all__ if name.endswith("Interceptor")}
    for name, defaults in named.items():
        signature = inspect.signature(getattr(interceptors, name))
        for parameter, value in re.findall(r"`(\w+)=([^`]+)`", defaults):
            assert signature.parameters[parameter].default == ast.literal_eval(value), (name, parameter)


def test_the_limits_named_are_those_there_are() -> None:
    """All of them, with their defaults."""
    text = RUNTIME.read_text("utf-8").partition("`Limits` of a run")[2].partition("Callers")[0]
    named = {name: ast.literal_eval(value) for name, value in re.findall(r"`(\w+)=([^`]+)`", text)}
    assert Limits(**named) == Limits()
    assert set(named) == set(Limits.__slots__)


async def park(address: str) -> EngineEvent:
    """Have the careful agent ask; returns the interrupt."""
    events = await ask(address)
    assert events[-1].done.stop_reason == StopReason.STOP_REASON_INTERRUPTED
    return events[-2]


async def test_an_approval_goes_the_way_the_page_says(page: Mapping[str, object], script: Sequence[object]) -> None:
    """Large payments are asked about, with prompt, arguments and expiry; the function that approves gets the answer."""
    approve_all = cast("Callable[[str, str], Awaitable[str]]", page["approve_all"])
    async with served(script, page["CAREFUL"]) as address:
        event = await park(address)
        (item,) = event.interrupt.items
        assert (item.id, item.tool_name, item.prompt) == ("c1", "pay", "Pay 120 to anna?")
        assert (item.args_json, item.HasField("expire_time")) == ('{"to": "anna", "amount": 120}', True)
        async with asyncio.timeout(60):
            assert await approve_all(address, event.run_id) == "paid 120 to anna"
    async with served([pays(0, "anna"), {"when": {"step": 1}, "say": [{"text": "ok"}]}], page["CAREFUL"]) as address:
        assert (await ask(address))[-1].done.stop_reason == StopReason.STOP_REASON_FINISHED


@pytest.mark.parametrize(("action", "answer"), [("approve", "paid 120 to anna"), ("edit", "paid 90 to anna")])
async def test_the_commands_of_the_page_answer_a_run(
    page: Mapping[str, object], script: Sequence[object], action: str, answer: str
) -> None:
    """Typed as they stand there, with the run's id in its place, they resume it and print its answer."""
    (line,) = [line for line in commands() if line.startswith(f"dualclaw resume RUN {action}")]
    async with served(script, page["CAREFUL"]) as address:
        run_id = (await park(address)).run_id
        words = [run_id if word == "RUN" else word for word in shlex.split(line, comments=True)[1:]]
        command = [sys.executable, "-m", "dualclaw_clients.cli", "--engine", address, *words]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
    assert process.returncode == 0
    assert answer in out.decode()


def commands() -> list[str]:
    """The lines a person would type, continued ones joined."""
    return "".join(blocks(RUNTIME, "sh")).replace("\\\n", " ").splitlines()


def test_every_command_of_the_page_can_be_typed() -> None:
    """The command line takes them, and what curl sends is a Resume request."""
    for line in commands():
        words = shlex.split(line, comments=True)
        if words[0] == "dualclaw":
            make_parser().parse_args(words[1:])
        else:
            request = json_format.Parse(words[words.index("-d") + 1], ResumeRequest())
            assert request.decisions[0].interrupt_id == "c1"
            assert "/v1/runs/RUN/resume" in line


async def test_a_changed_strategy_tells_the_model_to_come_to_an_end(page: Mapping[str, object]) -> None:
    """From its second call on, and not before."""
    agent = replace(cast("Agent", page["AGENT"]), strategy=cast("type[object]", page["Hurried"])())  # type: ignore[arg-type]
    turns = [
        {
            "when": {"step": 0, "system": r"^You pay bills\.$"},
            "say": [{"call": "pay", "args": {"to": "a", "amount": 1}}],
        },
        {"when": {"step": 1, "system": r"\n\nCome to an end\.$"}, "say": [{"text": "Done."}]},
    ]
    async with served(turns, agent) as address:
        assert (await ask(address))[-1].done.content == "Done."


async def test_the_team_of_the_page_works(page: Mapping[str, object], script: Sequence[object]) -> None:
    """The boss asks its cashier, hands over to the clerk, or leaves; each as the text says."""
    boss, clerk = page["BOSS"], page["AGENT"]
    asks = {"call": "cashier", "args": {"request": "pay anna"}}
    over = {"call": "transfer_to_agent", "args": {"agent": "clerk"}}
    turns = [
        {"when": {"user": "^pay anna$", "step": 0}, "say": [{"call": "pay", "args": {"to": "anna", "amount": 120}}]},
        {"when": {"user": "^pay anna$", "step": 1}, "say": [{"text": "{{result}}"}]},
        {"when": {"user": "^ask$", "step": 0}, "say": [asks]},
        {"when": {"user": "^ask$", "step": 1}, "say": [{"text": "{{result}}"}]},
        {"when": {"user": "^over$", "tools": "transfer_to_agent"}, "say": [over]},
        {"when": {"user": "^over$"}, "say": [{"text": "Clerk here."}]},
        {"when": {"user": "^leave$"}, "say": [{"call": "exit", "args": {"answer": "Good bye."}}]},
    ]
    async with served(turns, boss, clerk) as address:
        asked, handed, left = [(await ask(address, text, "boss"))[-1].done for text in ("ask", "over", "leave")]
    assert asked.content == "paid 120 to anna"
    assert handed.content == "Clerk here."
    assert (left.content, left.stop_reason) == ("Good bye.", StopReason.STOP_REASON_EXITED)

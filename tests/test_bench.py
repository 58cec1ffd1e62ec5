"""The benchmark measures what it says it does. Nothing here looks at how fast anything is."""

import asyncio
import json
import math
import os
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Thread

import httpx
import pytest
from rich.console import Console

from tests.bench import floor, frameworks, machine, picture, report
from tests.bench.children import ROOT, BenchError, Child, environment
from tests.bench.load_sources import Ask, Progress, WrongAnswer
from tests.bench.machine import Noise, Watch
from tests.bench.measuring import whole
from tests.bench.plan import SMOKE, Report, Row, case, in_turns
from tests.bench.provider import CALLS, text_of
from tests.bench.ratios import Goal, Ratio, compare, spread
from tests.bench.rows import ROWS
from tests.bench.rows_peers import beside
from tests.bench.stage import Stage, Target

# What the measurements say


def test_a_ratio_is_the_median_of_the_pairs() -> None:
    """Each of ours is divided by its own partner, so that a slow moment of both cancels out."""
    found = compare([1.0, 20.0, 3.0], [2.0, 40.0, 3.0])
    assert (found.value, found.pairs) == (0.5, 3)


def test_the_interval_spans_what_pairs_disagree_about() -> None:
    """Pairs that agree leave none; a spread of them is in it, and an outlier alone does not carry it off."""
    assert (spread([2.0] * 9).low, spread([2.0] * 9).high) == (2.0, 2.0)
    wide = spread([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 100.0])
    assert 1.0 <= wide.low < wide.value == 1.4 < wide.high < 100.0


def test_the_same_measurements_give_the_same_interval() -> None:
    """Chance has a fixed seed."""
    ratios = [1.0 + number * 37 % 101 / 100 for number in range(40)]
    assert spread(ratios) == spread(ratios)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], []), ([1.0], [0.0]), ([1.0, 1.0], [1.0, -1.0])])
def test_what_makes_no_ratio_is_refused(ours: list[float], theirs: list[float]) -> None:
    """No pairs, half a pair, or something that nothing can be divided by."""
    with pytest.raises(ValueError, match=r"pairs are needed|nothing can be compared"):
        compare(ours, theirs)


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.5, 1.5, "met"), (1.6, 2.0, "not met"), (1.4, 1.6, "too noisy")]
)
def test_an_interval_that_spans_the_goal_decides_nothing(low: float, high: float, verdict: str) -> None:
    """At most 1.5: all of it below is met, all above is not, else the machine was too noisy to tell."""
    assert Goal(1.5).verdict(Ratio((low + high) / 2, low, high, 9)) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(5.0, 9.0, "met"), (1.0, 4.9, "not met"), (4.0, 6.0, "too noisy")]
)
def test_a_goal_may_be_a_least(low: float, high: float, verdict: str) -> None:
    """At least 5: the other way round."""
    assert Goal(5.0, at_least=True).verdict(Ratio((low + high) / 2, low, high, 9)) == verdict


def test_a_row_is_as_good_as_its_worst_case() -> None:
    """One case that is not met, or not sure, is the row's verdict; a failure means it was not measured."""
    met = case("a", Goal(1.0), "them", "ms", [0.5, 0.5], [1.0, 1.0])
    missed = case("b", Goal(0.1), "them", "ms", [0.5, 0.5], [1.0, 1.0])
    assert Report([met]).verdict == "met"
    assert Report([met, missed]).verdict == "not met"
    assert Report([met], failure="it broke").verdict == "not measured"
    assert Report([met], failure="tokens merged", disturbed=True).verdict == "too noisy"
    assert Report().verdict == "not measured"


def test_a_floor_stands_beside_a_case_and_decides_nothing() -> None:
    """Its ratios are those of the pairs; one that lacks a measurement is no floor, and the verdict stays the same."""
    ours, theirs = [4.0, 6.0, 5.0], [10.0, 10.0, 10.0]
    with_floor = case("a", Goal(0.4), "them", "ms", ours, theirs, [2.0, 2.0, 2.0])
    assert with_floor.floor is not None
    assert (with_floor.floor.value, with_floor.floor.to_theirs.value, with_floor.floor.ours.value) == (2.0, 0.2, 2.5)
    for lacking in ([], [2.0], [2.0, math.nan, 2.0], [2.0, 0.0, 2.0]):
        found = case("a", Goal(0.4), "them", "ms", ours, theirs, lacking)
        assert (found.floor, found.ratio, found.verdict) == (None, with_floor.ratio, with_floor.verdict)


async def test_ours_and_theirs_take_turns_after_a_round_that_does_not_count() -> None:
    """Another begins each round, so that what slowly changes favours nobody, and none comes twice in a row."""
    told: list[str] = []

    async def measure(name: str) -> str:
        told.append(name)
        return name

    found = await in_turns(4, *(partial(measure, name) for name in "ABC"))
    assert "".join(told) == "ABC" + "ABC" + "BCA" + "CAB" + "ABC"
    assert found == [["A"] * 4, ["B"] * 4, ["C"] * 4]


# What the operating system says


def test_the_cpu_of_a_process_includes_threads_that_have_ended() -> None:
    """A thread that burnt 50 ms and is gone still counts."""

    def burn() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    before = machine.cpu_seconds(os.getpid())
    thread = Thread(target=burn)
    thread.start()
    thread.join()
    assert machine.cpu_seconds(os.getpid()) - before >= 0.05


async def test_a_process_that_is_gone_has_no_cpu() -> None:
    """It is an error and not a zero, for a server that died must not look fast."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    async with asyncio.timeout(60):
        await process.wait()
    with pytest.raises(OSError, match=r"."):
        machine.cpu_seconds(process.pid)


def test_memory_is_that_of_the_process() -> None:
    """What is taken shows."""
    before = machine.memory_bytes(os.getpid())
    taken = bytearray(b"x") * (32 << 20)
    assert machine.memory_bytes(os.getpid()) - before > len(taken) // 2


def test_our_own_processes_are_no_noise() -> None:
    """Of 8 seconds of all cores, 3 were busy; 1 of them was ours and 0.4 more the host took."""
    before = Watch(100.0, 5.0, 1000.0, {1: 10.0})
    after = Watch(103.0, 5.4, 1008.0, {1: 10.6, 2: 0.4})
    noise = before.until(after)
    assert (round(noise.others, 3), round(noise.stolen, 3), noise.quiet) == (0.25, 0.05, False)
    assert Noise(others=0.02, stolen=0.0).quiet
    assert not Noise(others=0.0, stolen=0.2).quiet


# What is asked and answered


def test_an_answer_that_left_something_out_is_no_answer() -> None:
    """Text that lacks a token is refused, so nobody is fast by dropping some; the whole of it counts its tokens."""
    progress = Progress(Ask(tokens=12), lambda: None)
    progress.add(text_of(11))
    with pytest.raises(WrongAnswer, match="asked for 12 tokens"):
        progress.check()
    progress.add(text_of(12).removeprefix(text_of(11)))
    progress.check()
    assert (progress.events, progress.first > 0, abs(progress.tokens - 12) <= 1) == (2, True, True)


@asynccontextmanager
async def provider(folder: Path) -> AsyncIterator[str]:
    """The fake provider; yields its address."""
    child = await Child.start("provider", [sys.executable, "-m", "tests.bench.provider"], folder, environment())
    try:
        yield child.address
    finally:
        await child.stop()


async def test_the_provider_calls_tools_in_every_turn_before_it_answers(tmp_path: Path) -> None:
    """Tool results of an earlier turn are no answer to the calls of this one."""
    question = {"role": "user", "content": "bench tokens=3 pace=0"}
    result = {"role": "tool", "content": "21 degrees", "tool_call_id": "call_0"}
    seen = []
    async with provider(tmp_path) as address, httpx.AsyncClient(timeout=60) as client:
        for messages in ([question], [question, result], [question, result, question]):
            answer = await client.post(f"{address}/chat/completions", json={"messages": messages})
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            deltas = [each["delta"] for line in lines for each in json.loads(line)["choices"]]
            calls = {call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call}
            seen.append((len(calls), "".join(delta.get("content") or "" for delta in deltas)))
        refused = await client.post(f"{address}/chat/completions", json={"messages": []})
    assert seen == [(2, ""), (0, text_of(3)), (2, "")]
    assert refused.status_code == 400


def test_the_floor_asks_what_an_agent_asks() -> None:
    """Both requests are JSON; the second has the calls and a result for each, by the ids that the provider gave."""
    question = json.dumps("bench tokens=3 pace=0").encode()
    first, second = (json.loads(floor.BEFORE + question + end) for end in (floor.ASKED, floor.RESULTS))
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert second["messages"][:2] == first["messages"]
    calls, *results = second["messages"][2:]
    wanted = [call["id"] for call in calls["tool_calls"]]
    assert [result["tool_call_id"] for result in results] == wanted == ["call_0", "call_1"]
    names = [tool["function"]["name"] for tool in first["tools"]]
    assert [call["function"]["name"] for call in calls["tool_calls"]] == names
    assert all(f'"id": "{call}"'.encode() in CALLS for call in wanted)


@pytest.mark.parametrize("pace", [0, 5])
async def test_the_floor_gives_whole_answers(tmp_path: Path, pace: int) -> None:
    """Every token, at once or over time; what comes together is one frame, and less often than the tokens came."""
    async with Stage(tmp_path, lambda text: None) as stage:
        target = await stage.floor()
        spent = await whole(stage, target, runs=3, tokens=60, pace=pace)
    assert 3 <= spent.events < 3 * 60
    assert len(spent.firsts) == 3
    assert all(spent.cpu[server.name] > 0 for server in target.servers)


async def test_a_floor_that_breaks_costs_no_row(tmp_path: Path) -> None:
    """Its measurements are no numbers then, it is not tried again, and the report says why, once."""
    found = Report()
    async with Stage(tmp_path, lambda text: None) as stage:
        tried: list[Target] = []

        async def measure(target: Target) -> float:
            tried.append(target)
            return (await whole(stage, target, runs=1, tokens=1)).total

        await (await stage.floor()).servers[0].stop()
        once = beside(stage, found, measure)
        assert [math.isnan(await once()) for _ in range(3)] == [True] * 3
    assert len(tried) == 1
    assert [note.partition(": ")[0] for note in found.notes] == ["no floor"]
    assert "a server has ended: floor" in found.notes[0]


async def test_the_provider_ends_what_it_is_writing_when_it_is_told(tmp_path: Path) -> None:
    """An answer whose next token is a minute away comes to its end at once, so no server is left with it."""
    messages = [{"role": "user", "content": "bench tokens=3 pace=60000"}, {"role": "tool", "tool_call_id": "call_0"}]
    async with (
        asyncio.timeout(60),
        provider(tmp_path) as address,
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{address}/chat/completions", json={"messages": messages}) as answer,
    ):
        lines = answer.aiter_lines()
        first = await anext(lines)
        assert (await client.post(address, content=b"release")).status_code == 200
        rest = [line async for line in lines]
    assert text_of(1) in first
    assert [line for line in rest if line][-1] == "data: [DONE]"
    assert not any('"content"' in line for line in rest)


async def test_a_server_that_died_is_an_error_that_says_what_it_wrote(tmp_path: Path) -> None:
    """Its last words are in it; so is the name of one that never listens."""
    command = [sys.executable, "-c", "import sys; sys.exit('no port for me')"]
    with pytest.raises(BenchError, match=r"doomed ended with 1: no port for me"):
        await Child.start("doomed", command, tmp_path, environment())
    with pytest.raises(BenchError, match=r"mute does not listen after 0\.1 s"):
        await Child.start(
            "mute", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, environment(), timeout=0.1
        )


async def test_what_a_server_refuses_fails_the_measurement(tmp_path: Path) -> None:
    """The load client reports it, and nothing is measured: the provider takes no question without tokens in it."""
    async with Stage(tmp_path, lambda text: None) as stage:
        child = await Child.start("provider", [sys.executable, "-m", "tests.bench.provider"], tmp_path, environment())
        try:
            target = Target("refuses", "raw-http", f"{child.address}/stream", (child,))
            with pytest.raises(BenchError, match=r"run raw-http: WrongAnswer: .* answered HTTP/1\.1 400"):
                await whole(stage, target, runs=1, tokens=1)
        finally:
            await child.stop()


# What comes out


def test_pins_name_versions_and_no_place() -> None:
    """What each peer is compared in is known before it is installed."""
    for peer in frameworks.PEERS:
        assert set(frameworks.versions(peer)) == {*peer.shown, "fastapi", "uvicorn"}


async def test_a_peer_that_is_missing_is_named_with_its_reason(tmp_path: Path) -> None:
    """In the table and in the JSON; a row is never quietly measured against fewer."""
    missing = {"agno": "cannot be installed: no such wheel"}
    console = Console(record=True, width=180, file=(tmp_path / "out").open("w"))
    found = Report([case("1 run", Goal(0.5), "langgraph", "ms", [1.0], [4.0])], noise=Noise(0.5, 0.0))
    report.show(console, [(ROWS[0], found)], missing)
    console.file.close()
    text = console.export_text()
    assert "agno is missing from every comparison: cannot be installed: no such wheel" in text
    assert "too noisy for these figures to be quoted" in text
    told = report.as_json(SMOKE, [(ROWS[0], found)], missing)
    assert (told["missing"], "agno" in told["peers"]) == (missing, False)  # type: ignore[operator]


async def test_the_floor_is_told_beside_its_case(tmp_path: Path) -> None:
    """In a line below the table, in the JSON and in the picture; a floor beyond the goal is said to be that."""
    near = case("1 run", Goal(0.5), "agno", "ms", [3.0], [10.0], [2.0])
    far = case("64 runs", Goal(0.125), "agno", "ms", [3.0], [10.0], [2.0])
    found = Report([near, far])
    console = Console(record=True, width=180, file=(tmp_path / "out").open("w"))
    report.show(console, [(ROWS[0], found)], {})
    console.file.close()
    text = console.export_text()
    times = "ours is 1.5 times [1.5 .. 1.5] the floor"
    assert f"1 run, floor: 2 ms (0.2 [0.2 .. 0.2] of agno); {times}" in text
    assert f"64 runs, floor: 2 ms (0.2 [0.2 .. 0.2] of agno, which misses the goal too); {times}" in text
    told = json.loads(json.dumps(report.as_json(SMOKE, [(ROWS[0], found)], {})))
    floors = [each["floor"] for each in told["rows"][0]["cases"]]
    assert [(each["value"], each["to_theirs"]["value"], each["ours"]["value"]) for each in floors] == [
        (2, 0.2, 1.5)
    ] * 2
    without = Report([case("1 run", Goal(0.5), "agno", "ms", [3.0], [10.0])])
    marks = [picture.draw([(ROWS[0], each)]).count("<line") for each in (Report([near]), without)]
    assert marks[0] == marks[1] + 1


def test_the_picture_shows_what_was_not_measured_too() -> None:
    """A row that failed has its line and its reason; text is escaped."""
    row = Row(3, "ours < theirs & more", ROWS[0].measure)
    good = Report([case("1 run", Goal(5.0, at_least=True), "them", "ms", [8.0, 7.0], [1.0, 1.0])])
    drawn = picture.draw([(ROWS[0], good), (row, Report(failure="<gone>"))])
    root = ET.fromstring(drawn)  # noqa: S314  # drawn here
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "3. ours < theirs & more" in texts
    assert "not measured: <gone>" in texts
    assert any(text and text.endswith("met") for text in texts)


async def bench(*options: str) -> tuple[int, str]:
    """Run the command; returns its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench", *options, cwd=ROOT, env=environment(),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(300):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.timeout(320)
async def test_the_benchmark_measures_rows_from_end_to_end(tmp_path: Path) -> None:
    """Real servers, real answers, every output; what comes out are figures, whatever they are."""
    code, out = await bench("--smoke", "--rows", "2,11", "--json", f"{tmp_path}/b.json", "--svg", f"{tmp_path}/b.svg")
    assert code == 0, out
    told = json.loads((tmp_path / "b.json").read_text("utf-8"))
    assert [row["row"] for row in told["rows"]] == [2, 11]
    for row in told["rows"]:
        assert row["verdict"] in {"met", "not met", "too noisy"}
        assert all(each["ratio"]["value"] != 0 and each["ratio"]["pairs"] == SMOKE.pairs for each in row["cases"])
        assert row["noise"]["others"] >= 0
    assert ET.parse(tmp_path / "b.svg").getroot().tag.endswith("svg")  # noqa: S314  # drawn here
    assert "us/token" in out
    assert "k events/s" in out


async def test_a_row_that_is_not_there_is_refused() -> None:
    """With what there is."""
    code, out = await bench("--rows", "2,99")
    assert code == 2
    assert "no such row: 99; there are 1 to 11" in out

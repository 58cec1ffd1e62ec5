"""The chat page: how it is served, and its stream code run by node against a real gateway over a bad line."""

import asyncio
import json
import re
import shutil
from importlib import resources
from pathlib import Path

from dualclaw import InterruptItem, InterruptKind, Run, RunState
from dualclaw.events import make_delta, make_done, make_interrupt, make_rewind
from tests.toolchains import require

PAGE = Path(str(resources.files("dualclaw_clients.web") / "page"))
PAGE_FILES = sorted(PAGE.iterdir())


async def test_the_page_is_served_with_a_policy_that_lets_nothing_foreign_run(web):
    """No inline script or style, no foreign address, no frame around it."""
    answer = await web.http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_everything_the_page_refers_to_is_served_from_here(web):
    """All scripts, styles and pictures are package data; nothing comes from elsewhere."""
    html = (await web.http.get("/")).text
    paths = set(re.findall(r'(?:src|href)="(/[^"]*)"', html))
    for file in (file for file in PAGE_FILES if file.suffix == ".js"):
        paths |= {f"/page/{found}" for found in re.findall(r'from "\./([^"]+)"', file.read_text("utf-8"))}
    assert {"/page/main.js", "/page/stream.js", "/page/markdown.js", "/page/layout.css"} <= paths
    for path in paths:
        answer = await web.http.get(path)
        assert answer.status_code == 200, path
        assert "content-security-policy" in answer.headers
    for file in PAGE_FILES:
        foreign = re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", file.read_text("utf-8"))
        assert [address for address in foreign if "www.w" not in address] == [], file.name


async def test_a_browser_that_has_this_version_gets_304(web):
    """Files are checked each time and sent when they changed, so an update is seen at once."""
    first = await web.http.get("/page/main.js")
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    again = await web.http.get("/page/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = await web.http.head("/page/main.js")
    assert head.content == b""
    assert head.headers["content-length"] == first.headers["content-length"]


def test_no_script_of_the_page_can_turn_text_into_markup():
    """Model output reaches the document as text nodes only; the ways around that are not used at all."""
    ways = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write"
        r"|DOMParser|srcdoc|createContextualFragment|eval\(|new Function"
    )
    scripts = sorted(PAGE.glob("*.js"))
    assert len(scripts) >= 4
    for script in scripts:
        assert ways.findall(script.read_text("utf-8")) == [], script.name
    html = (PAGE / "index.html").read_text("utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", html) == []


def done(text: str, seq: int = 0):
    return make_done(message_id="m", conversation_id="c", content=text, seq=seq)


async def run_node(script: str, *arguments: str) -> dict[str, object]:
    """Run a module that imports the page's scripts; returns the JSON it prints."""
    process = await asyncio.create_subprocess_exec(
        require("node"), "--input-type=module", "-", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(script.encode()), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    found: dict[str, object] = json.loads(out)
    return found


def modules(tmp_path: Path) -> Path:
    """Copy the scripts to where node takes .js files for modules."""
    for script in PAGE.glob("*.js"):
        shutil.copy(script, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    return tmp_path


FOLLOW = """
const base = process.argv[3];
const keep = new Map();
globalThis.sessionStorage = { getItem: (k) => keep.get(k) ?? null, setItem: (k, v) => keep.set(k, v) };
globalThis.window = new EventTarget();
const plain = globalThis.fetch;
globalThis.fetch = (path, options) => plain(base + path, options);
const { RunStream } = await import("file://" + process.argv[2] + "/stream.js");
const events = [], links = [];
const start = JSON.parse(process.argv[4]);
const stream = new RunStream({ ...start, onEvent: (e) => events.push(e), onLink: (up) => links.push(up) });
let refusal = null;
await stream.read().catch((error) => { refusal = { status: error.status, reason: error.reason }; });
console.log(JSON.stringify({ events, links, refusal, runId: stream.runId, lastId: stream.lastId }));
process.exit(0);
"""
ASK = {"request": {"request_id": "q", "message": {"role": "ROLE_USER", "parts": [{"text": "hi"}]}}}


async def test_the_page_heals_broken_lines_without_a_doubled_or_missing_character(relay, fake_engine, tmp_path):
    """Five connections break, inside frames and even inside characters; the folded text is exact."""
    text = "你好，世界🍸abc" * 12
    # Numbered here, because a start that is sent again with its request_id streams the same events again.
    deltas = [make_delta(char, seq=seq) for seq, char in enumerate(text, 1)]
    fake_engine.on("Run", [*deltas, done(text, seq=len(text) + 1)])
    fake_engine.runs[fake_engine.run_id] = Run(state=RunState.RUN_STATE_SUCCEEDED, last_seq=len(text) + 1)
    relay.cut_after(30, 1_501, 2_777, 700, 1_999)
    found = await run_node(FOLLOW, str(modules(tmp_path)), relay.url, json.dumps(ASK))
    events = found["events"]
    assert isinstance(events, list)
    assert "".join(event["content"] for event in events if event["type"] == "delta") == text
    assert [event["seq"] for event in events] == list(range(1, len(text) + 2))
    assert events[-1]["type"] == "done"
    assert found["refusal"] is None
    starts = fake_engine.calls_of("Run")
    assert {call.request.request_id for call in starts} == {"q"}
    assert len(fake_engine.calls_of("Attach")) >= 3


async def test_the_page_follows_a_parked_run_into_its_next_segment(web, fake_engine, tmp_path):
    """After an interrupt and its done the page stays with the run and sees the answer given elsewhere."""
    item = InterruptItem(id="i", kind=InterruptKind.INTERRUPT_KIND_APPROVAL, tool_name="t")
    parked = [make_delta("a"), make_interrupt([item]), done("a")]
    fake_engine.on("Run", parked)
    fake_engine.runs[fake_engine.run_id] = Run(id=fake_engine.run_id, state=RunState.RUN_STATE_INTERRUPTED, last_seq=3)
    fake_engine.on("Attach", ["headers", 0.05, make_delta("b", seq=4), done("b", seq=5)])  # fmt: skip
    found = await run_node(FOLLOW, str(modules(tmp_path)), web.url, json.dumps(ASK))
    events = found["events"]
    assert isinstance(events, list)
    assert [event["type"] for event in events] == ["delta", "interrupt", "done", "delta", "done"]
    assert fake_engine.calls_of("Attach")[0].request.after_seq == 3


async def test_the_page_shows_a_refusal_and_does_not_ask_again(web, fake_engine, tmp_path):
    """A refusal that a retry cannot help is told once, with its reason."""
    found = await run_node(FOLLOW, str(modules(tmp_path)), web.url, json.dumps({"runId": "none", "lastId": 3}))
    assert found["refusal"] == {"status": 404, "reason": "UNKNOWN_RUN"}
    assert len(fake_engine.calls_of("GetRun")) == 1


SPLIT = """
const { split } = await import("file://" + process.argv[2] + "/markdown.js");
const texts = JSON.parse(process.argv[3]);
const seen = (block) => [block.kind, block.text ?? block.items ?? block.lines ?? block.source];
console.log(JSON.stringify(texts.map((text) => split(text).map(seen))));
"""


async def test_the_page_cuts_markdown_into_blocks_and_leaves_markup_as_text(tmp_path):
    """Fences (also unclosed ones), lists, headings and paragraphs; anything else stays plain text."""
    texts = [
        "a\nb\n\n```py\nx = 1\n\n<b>\n```\nc",
        "```\nopen <script>",
        "# T\n- one\n- two\n  more\n\n1. x",
        "<img src=x onerror=alert(1)> ![i](http://x)",
    ]
    found = await run_node(SPLIT, str(modules(tmp_path)), json.dumps(texts))
    assert found == [
        [["p", "a\nb"], ["code", ["x = 1", "", "<b>"]], ["p", "c"]],
        [["code", ["open <script>"]]],
        [["h3", "T"], ["ul", ["one", "two\nmore"]], ["ol", ["x"]]],
        [["p", "<img src=x onerror=alert(1)> ![i](http://x)"]],
    ]


async def test_the_page_takes_a_rewind_as_it_comes(web, fake_engine, tmp_path):
    """The rewind reaches the view with its replacement text, in its place among the deltas."""
    fake_engine.on("Run", [make_delta("Hel"), make_rewind("H", attempt=1), make_delta("i"), done("Hi")])  # fmt: skip
    found = await run_node(FOLLOW, str(modules(tmp_path)), web.url, json.dumps(ASK))
    events = found["events"]
    assert isinstance(events, list)
    assert [event.get("content") for event in events] == ["Hel", "H", "i", "Hi"]


TAKE = """
globalThis.sessionStorage = { getItem: () => null };
const { RunStream } = await import("file://" + process.argv[2] + "/stream.js");
const events = [];
const stream = new RunStream({ runId: "r", lastId: 2, onEvent: (event) => events.push(event.content) });
for (const frame of JSON.parse(process.argv[3])) stream.take(frame);
console.log(JSON.stringify({ events, lastId: stream.lastId }));
"""


async def test_the_page_drops_an_event_it_has_seen_and_skips_comments(tmp_path):
    """Whatever a proxy or server repeats, no character is shown twice."""

    def text(seq: int, content: str) -> str:
        return f'id: {seq}\ndata: {{"type": "delta", "content": "{content}"}}'

    frames = [text(2, "old"), ": heartbeat", text(3, "a"), text(3, "a"), text(1, "older"), text(4, "b")]
    found = await run_node(TAKE, str(modules(tmp_path)), json.dumps(frames))
    assert found == {"events": ["a", "b"], "lastId": 4}

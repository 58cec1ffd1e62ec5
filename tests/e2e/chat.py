"""The chat page as tests see it: what it shows, what can be done with it, and what it is served by."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from playwright.async_api import Locator, Page, expect

from .process import Launcher, Process

PATIENCE = 60_000
"""Milliseconds a condition of the page may take to come true."""
MARKUP = "<img src=x onerror=\"document.title='owned'\"> <script>document.title='owned'</script> </p>&amp;"
THOUGHT = "A count first. <i>Then</i> the ledger, which may be sealed."
LONG = " ".join(f"屋 and house number {number} 🏠," for number in range(60))
"""One paragraph without a mark of Markdown, in which every piece differs from every other."""
STEPWISE = "step by step"
"""With these words in the question the answer is written so: behind each stop only once ``open_gate`` has named it."""
THOUGHT_STOPS = ("first.", "ledger")
STOPS = tuple(f"number {number} " for number in range(10, 60, 10))
WIDE = (
    f"See https://example.org/{'very' * 40}long\n\n```python\n{'x = 1; ' * 40}{MARKUP}\n```\n\n"
    f"| {MARKUP} `a` {'| b ' * 30}|\n|{'---|' * 31}\n| *{MARKUP}* {'| word ' * 30}|\n\n"
    f"1. one {MARKUP} `b`\n   - two `{'code' * 40}` **{MARKUP}** three"
)
TURNS: list[dict[str, object]] = [
    {
        "when": {"user": "survey", "step": 0},
        "say": [
            {"reasoning": THOUGHT, "chunk": 3, "delay": 0.01},
            {"text": "One moment.", "chunk": 3},
            {"call": "survey", "args": {"town": "<u>Old</u> Town"}},
            {"call": "ledger", "args": {"year": 1888}},
        ],
    },
    {"when": {"user": "wide", "step": 1}, "say": [{"text": WIDE}, {"usage": {"input_tokens": 5}}]},
    {"when": {"user": "survey", "step": 1}, "say": [{"text": f"{MARKUP} {LONG}", "chunk": 9, "delay": 0.005}]},
    {"when": {"user": "hang"}, "say": [{"text": "So far, so", "chunk": 2}, {"hang": True}]},
    {"when": {"user": "slow"}, "say": [{"text": LONG, "chunk": 6, "delay": 0.01}]},
    {
        "when": {"user": "fail"},
        "say": [{"text": "It begins."}, {"fail": "MODEL_AUTH", "message": "The key is not valid.", "retryable": False}],
    },
    {"say": [{"text": "You said {{user}}"}]},
]
AGENTS = (
    f"STEPWISE, STOPS = {STEPWISE!r}, {THOUGHT_STOPS + STOPS!r}\n"
    '''
import asyncio
from contextlib import aclosing
from pathlib import Path

from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.model import ReasoningDelta, TextDelta
from dualclaw_server.engine.tool import ToolContext, ToolRaised, tool


async def opened(tenant, name):
    """Wait for a file that opens this gate of the tenant, or all."""
    while not (Path(tenant).exists() or Path(f"{tenant}.{name}").exists()):
        await asyncio.sleep(0.01)


class PenInterceptor(Interceptor):
    """Writes step by step: what comes behind a stop waits until it is opened."""

    async def intercept_stream(self, call, call_next):
        written = ""
        async with aclosing(call_next(call)) as chunks:
            async for chunk in chunks:
                yield chunk
                if STEPWISE in call.trace.user_text and isinstance(chunk, TextDelta | ReasoningDelta):
                    for stop in STOPS:
                        if stop not in written and stop in written + chunk.text:
                            await opened(call.trace.key.tenant, stop)
                    written += chunk.text


@tool(effect="read")
async def survey(town: str, context: ToolContext) -> str:
    """Count houses, which takes until its gate is open."""
    await opened(context.tenant, "survey")
    return '{"houses": 412, "note": "<b onclick=alert(1)>loud</b>"}'


@tool(effect="read")
async def ledger(year: int) -> str:
    """Fail."""
    raise ToolRaised(f"the ledger of {year} is sealed")


AGENT = Agent("surveyor", description="Counts houses.", tools=[survey, ledger], interceptors=[PenInterceptor()])
'''
)

RECORDER = """
window.seen = [];
new MutationObserver(() => {
  const turn = [...document.querySelectorAll("#turns > .turn")].pop();
  if (!turn) return;
  const thought = turn.querySelector(".reasoning");
  const state = {
    text: turn.querySelector(".answer").textContent,
    thought: thought.hidden ? "" : thought.querySelector(".thought").textContent,
    open: thought.open,
    live: turn.classList.contains("live"),
  };
  if (JSON.stringify(state) !== JSON.stringify(window.seen.at(-1))) window.seen.push(state);
}).observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
"""

CONTRAST = """(selectors) => selectors.map((selector) => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const element = [...document.querySelectorAll(selector)].pop();
  let ground = element;
  while ((parse(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0) ground = ground.parentElement;
  const light = (color) => {
    const [r, g, b] = parse(color).map((part) => part / 255)
      .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(ground).backgroundColor)];
  return [selector, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), b];
})"""
"""For each selector: itself, contrast of the last such element with what lies below it, and how light that is."""


def settings_of(folder: Path, **more: str) -> dict[str, str]:
    """Write script and agents; returns the settings of an engine that has them."""
    (folder / "page_agents.py").write_text(AGENTS, "utf-8")
    (folder / "page.json").write_text(json.dumps({"name": "page", "turns": TURNS}), "utf-8")
    return {
        "DUALCLAW_LISTEN": "127.0.0.1:0",
        "DUALCLAW_STORE": "memory:",
        "DUALCLAW_GRACE": "0",
        "DUALCLAW_MODEL": f"scripted:{folder / 'page.json'}",
        "DUALCLAW_AGENTS": "page_agents:AGENT",
        **more,
    }


def open_gate(gate: Path, *names: str) -> None:
    """Let what waits at these gates of a tenant go on, or at all of them, for good."""
    for path in [gate.with_name(f"{gate.name}.{name}") for name in names] or [gate]:
        path.touch()


class Shared:
    """An engine with many tenants, and a gateway."""

    def __init__(self, folder: Path, settings: Callable[..., dict[str, str]] = settings_of) -> None:
        self.folder = folder
        names = [f"tenant-{number}" for number in range(40)]
        self._tenants: Iterator[str] = iter(names)
        keys = [
            {"key_sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name, "subject": "s", "roles": ["user"]}
            for name in names
        ]
        (folder / "keys.json").write_text(json.dumps(keys))
        self.settings = settings(folder, DUALCLAW_KEYS_FILE=str(folder / "keys.json"))
        self.engine = Process("dualclaw_server", self.settings, folder).start()
        web = {"DUALCLAW_WEB_LISTEN": "127.0.0.1:0", "DUALCLAW_ENGINE": self.engine.address}
        self.web = Process("dualclaw_clients.web", web, folder).start()

    def tenant(self) -> str:
        """Return one nobody has had; it is also its key."""
        return next(self._tenants)


class Line:
    """A TCP way to a gateway that breaks in the middle of what it is told to, as a lost network does.

    ``cut_at`` holds pieces of what the gateway sends: where the first of them passes, half of it is let through and
    every connection is broken; then the next one is waited for.
    """

    def __init__(self, upstream: str) -> None:
        self._host, _, port = upstream.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self.cut_at: list[bytes] = []
        self.address = ""

    async def start(self) -> "Line":
        """Listen at a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def close(self) -> None:
        """Break what is open and listen no more."""
        if self._server is not None:
            self._server.close()
        self._break()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    async def all_cut(self) -> None:
        """Wait until every cut has been made."""
        async with asyncio.timeout(PATIENCE / 1000), self._changed:
            await self._changed.wait_for(lambda: not self.cut_at)

    def _break(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = {writer}
        self._open.add(writer)
        up: asyncio.Task[None] | None = None
        try:
            with contextlib.suppress(OSError):
                inner_reader, inner_writer = await asyncio.open_connection(self._host, self._port)
                ends.add(inner_writer)
                self._open.add(inner_writer)
                up = asyncio.create_task(self._copy(reader, inner_writer, watched=False))
                await self._copy(inner_reader, writer, watched=True)
        finally:
            if up is not None:
                up.cancel()
                await asyncio.wait({up})
            for end in ends:
                end.close()
            self._open -= ends
            self._tasks.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, watched: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if watched and self.cut_at and (place := data.find(self.cut_at[0])) >= 0:
                    writer.write(data[: place + len(self.cut_at.pop(0)) // 2])
                    await writer.drain()
                    await asyncio.sleep(0.05)  # so that what was let through arrives before the end does
                    self._break()
                    async with self._changed:
                        self._changed.notify_all()
                    return
                writer.write(data)
                await writer.drain()


@dataclass
class Chat:
    """A page, what it is served by, and what a reader and a writer of it do."""

    page: Page
    engine: Process
    web: Process
    launch: Launcher
    settings: dict[str, str]
    gate: Path
    faults: list[str] = field(default_factory=list)

    async def other(self) -> "Chat":
        """Return a second tab, at the page's address."""
        tab = replace(self, page=await self.page.context.new_page())
        tab.page.on("pageerror", lambda error: self.faults.append(str(error)))
        await tab.page.goto(self.web.address)
        return tab

    def open_gate(self, *names: str) -> None:
        """Let the tool named survey end, or whatever else waits at a gate; without a name at all of them."""
        open_gate(self.gate, *names)

    async def read_along(self) -> None:
        """Read an answer that is written step by step: what is written is shown before anything follows."""
        for stop in STOPS:
            await expect(self.text).to_contain_text(stop)
            self.open_gate(stop)

    def restart_engine(self) -> None:
        """Start an engine where the one that was killed had been."""
        self.engine = self.launch("dualclaw_server", **{**self.settings, "DUALCLAW_LISTEN": self.engine.address})

    def restart_web(self) -> None:
        """Start a gateway where the one that was killed had been."""
        address = self.web.address.removeprefix("http://")
        self.web = self.launch("dualclaw_clients.web", DUALCLAW_WEB_LISTEN=address, DUALCLAW_ENGINE=self.engine.address)

    @property
    def turn(self) -> Locator:
        """The newest answer."""
        return self.page.locator("#turns > .turn").last

    @property
    def text(self) -> Locator:
        return self.turn.locator(".answer:not(.past)")

    def step(self, name: str) -> Locator:
        return self.turn.locator(".steps > li", has=self.page.locator(".title", has_text=name))

    async def ask(self, text: str) -> None:
        """Type a question and press Enter."""
        await self.page.locator("#question").focus()
        await self.page.keyboard.type(text)
        await self.page.keyboard.press("Enter")

    async def reload(self) -> None:
        """Reload the page once its address names the conversation, which a busy machine may take a moment for."""
        await self.page.wait_for_function("location.hash.length > 1")
        await self.page.reload()

    async def over(self) -> None:
        """Wait until nothing runs and the newest answer is complete."""
        await expect(self.page.locator("#send")).to_be_visible()
        await expect(self.page.locator("#stop")).to_be_hidden()
        await expect(self.text).to_have_attribute("aria-busy", "false")

    async def unfold(self) -> None:
        """Open all steps."""
        rows = "(rows) => rows.forEach((row) => row.parentElement.open || row.click())"
        await self.page.locator(".steps summary").evaluate_all(rows)

    async def shown(self) -> str:
        """Return the newest answer, character by character, as it stands at this moment."""
        return await self.text.text_content() or ""

    async def shows(self, whole: object) -> None:
        """Wait until the newest answer is this, character by character: it is drawn a frame after it has come."""
        await expect(self.text).to_have_js_property("textContent", whole)

    async def seen(self) -> list[dict[str, object]]:
        """Return every state of the newest answer that was shown since the page was loaded."""
        states: list[dict[str, object]] = await self.page.evaluate("() => window.seen")
        return states

    async def get(self, path: str) -> dict[str, object]:
        """Ask the gateway directly."""
        answer = await self.page.request.get(self.web.address + path)
        assert answer.ok, await answer.text()
        found: dict[str, object] = await answer.json()
        return found

    async def runs(self) -> list[dict[str, object]]:
        """Return all runs, the newest first."""
        found = (await self.get("/v1/runs"))["runs"]
        assert isinstance(found, list)
        return found

    async def log(self) -> list[dict[str, object]]:
        """Return all events of the newest run, which must be over."""
        answer = await self.page.request.get(f"{self.web.address}/v1/runs/{(await self.runs())[0]['id']}/events")
        lines = (await answer.text()).split("\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    def conversation(self, title: str) -> Locator:
        """An entry of the list."""
        return self.page.locator("#conversations > li", has=self.page.locator(".name", has_text=title))


def texts(states: list[dict[str, object]]) -> list[str]:
    """Return the texts that were shown, each one once."""
    return list(dict.fromkeys(str(state["text"]) for state in states))


def assert_grown(states: list[dict[str, object]], whole: str) -> None:
    """Whatever was shown was a beginning of the whole text, and never less than before."""
    shown = texts(states)
    assert [text for text in shown if not whole.startswith(text)] == []
    assert shown == sorted(shown, key=len)
    assert shown[-1] == whole

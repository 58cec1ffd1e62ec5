"""The page behind a line that breaks: in mid-text, while it is asked something, at the very end, again and again."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.toolchains import require

from . import approvals, chat
from .chat import LONG, STEPWISE, Chat, Line, Shared, assert_grown, texts
from .conftest import Open

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

SOURCE = """(path) => new Promise((resolve) => {
  const events = [], source = new EventSource(path);
  let losses = 0;
  source.onmessage = ({ lastEventId, data }) => events.push([lastEventId, JSON.parse(data).content]);
  source.onerror = () => {
    losses += 1;
    if (source.readyState === EventSource.CLOSED) resolve({ events, losses });
  };
})"""


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """An engine that writes long texts."""
    require("chromium")
    shared = Shared(tmp_path_factory.mktemp("lines"), chat.settings_of)
    yield shared
    shared.web.stop()
    shared.engine.stop()


@pytest.fixture(scope="module")
def clerk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """An engine that asks."""
    require("chromium")
    shared = Shared(tmp_path_factory.mktemp("clerk-lines"), approvals.settings_of)
    yield shared
    shared.web.stop()
    shared.engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def line(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    """A line to the gateway of the test's engine."""
    shared: Shared = request.getfixturevalue("clerk" if "clerk" in request.fixturenames else "writer")
    line = await Line(shared.web.address).start()
    yield line
    await line.close()


async def opened(open_chat: Open, shared: Shared, line: Line) -> Chat:
    """Open the page by the line; what tests ask the gateway directly goes past it."""
    tenant = shared.tenant()
    page = await open_chat(shared.engine, shared.web, shared.settings, shared.folder, tenant=tenant, key=tenant)
    await page.page.goto(line.address)
    return page


async def test_five_cuts_in_an_answer_cost_no_character(open_chat: Open, writer: Shared, line: Line) -> None:
    """Cut in the middle of frames, two of them neighbours, and of the end itself: each text shown was a beginning."""
    page = await opened(open_chat, writer, line)
    # Pieces of six characters, as the model writes them: none is torn by the end of a frame, wherever frames end.
    line.cut_at = [LONG[6 * place :][:6].encode() for place in (5, 70, 71, 200)] + [b'"type": "done"']
    await page.ask(f"slow {STEPWISE}")
    await page.read_along()
    await page.over()
    assert line.cut_at == []
    assert (await page.log())[-1]["content"] == LONG
    await page.shows(LONG)
    assert_grown(await page.seen(), LONG)
    await expect(page.page.locator(".question")).to_have_count(1)
    await expect(page.page.locator("#status")).to_be_empty()
    assert len(await page.runs()) == 1


async def test_cuts_around_an_approval_neither_lose_nor_double_it(open_chat: Open, clerk: Shared, line: Line) -> None:
    """Cut as it is asked, as the segment ends, and as the next one ends: one card, one note, both texts whole."""
    page = await opened(open_chat, clerk, line)
    line.cut_at = [b'"type": "interrupt"', b'"type": "done"']
    await page.ask("note")
    card = page.page.locator(".card")
    await expect(card).to_have_count(1)
    await line.all_cut()
    line.cut_at = [b'"type": "delta"', b'"type": "done"']
    await card.get_by_role("button", name="Approve", exact=True).click()
    await page.over()
    assert line.cut_at == []
    await expect(card).to_have_count(0)
    await expect(page.turn.locator(".answer")).to_have_text(["One moment.", "Result: noted milk"])
    assert approvals.notes(page.gate.parent, page.gate.name) == [f"milk {approvals.BIG}"]
    whole = [text for text in texts(await page.seen()) if text]
    assert [
        text for text in whole if not "One moment.".startswith(text) and not "Result: noted milk".startswith(text)
    ] == []


async def test_a_browsers_own_event_source_reads_a_run_over_a_cut(open_chat: Open, writer: Shared, line: Line) -> None:
    """``/events?after=1``: ids go up by one, the cut frame comes again whole, and 204 closes it for good."""
    page = await opened(open_chat, writer, line)
    await page.ask("slow")
    await page.over()
    run = (await page.runs())[0]
    line.cut_at = [b'"seq": 4,']
    found = await page.page.evaluate(SOURCE, f"/v1/runs/{run['id']}/events?after=1")
    assert line.cut_at == []
    assert [int(number) for number, _ in found["events"]] == list(range(2, int(str(run["last_seq"])) + 1))
    assert LONG.endswith("".join(content for _, content in found["events"][:-1]))
    assert found["events"][-1][1] == LONG
    assert found["losses"] == 3  # the cut, the end of the response, and the 204

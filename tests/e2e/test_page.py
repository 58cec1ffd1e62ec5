"""The chat page in a real browser, with a real gateway and engine behind it.

Engine and gateway are shared, with a tenant for each test; what is killed is the test's own. A recorder in the page
notes every state that was shown, so "text grew" and "nothing was ever doubled" are judged by all of them and not by
the moments a test happened to look. Nothing waits for a fixed time, and nothing is done "in the middle" of what goes on
by itself: tools, and answers that are written step by step, are held by files, and everything else is waited for as a
condition.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.toolchains import require

from .chat import (
    CONTRAST,
    LONG,
    MARKUP,
    STEPWISE,
    THOUGHT,
    THOUGHT_STOPS,
    Chat,
    Shared,
    assert_grown,
    settings_of,
)
from .conftest import Launcher, Open

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

SAID = """() => {
  window.said = [];
  const told = document.querySelector("#told");
  new MutationObserver(() => window.said.push(told.textContent)).observe(told, { childList: true });
}"""
"""Notes whatever a screen reader is told."""
READ = [
    ".answer p", ".answer pre code", ".answer td", ".foot", ".question", ".finding strong", ".finding p", ".kind",
    ".brief", ".step dt", ".step dd pre", ".thought", ".conversations .when", ".hint", "#title",
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Services for tests that kill none."""
    require("chromium")
    shared = Shared(tmp_path_factory.mktemp("page"))
    yield shared
    shared.web.stop()
    shared.engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def chat(open_chat: Open, shared: Shared) -> Chat:
    """A page on the shared services."""
    tenant = shared.tenant()
    return await open_chat(shared.engine, shared.web, shared.settings, shared.folder, tenant=tenant, key=tenant)


@pytest_asyncio.fixture(loop_scope="module")
async def chat_on_own_gateway(open_chat: Open, shared: Shared, launch: Launcher) -> Chat:
    """A page whose gateway may be killed."""
    web = launch("dualclaw_clients.web", DUALCLAW_WEB_LISTEN="127.0.0.1:0", DUALCLAW_ENGINE=shared.engine.address)
    tenant = shared.tenant()
    return await open_chat(shared.engine, web, shared.settings, shared.folder, tenant=tenant, key=tenant)


@pytest_asyncio.fixture(loop_scope="module")
async def chat_on_own_engine(open_chat: Open, launch: Launcher, tmp_path: Path) -> Chat:
    """A page whose engine, which keeps its runs in SQLite, may be killed."""
    require("chromium")
    settings = settings_of(tmp_path, DUALCLAW_STORE="sqlite:page.db")
    engine = launch("dualclaw_server", **settings)
    web = launch("dualclaw_clients.web", DUALCLAW_WEB_LISTEN="127.0.0.1:0", DUALCLAW_ENGINE=engine.address)
    return await open_chat(engine, web, settings, tmp_path)


async def test_an_answer_is_shown_as_it_comes(chat: Chat) -> None:
    """Folded reasoning, steps with their live phase, a growing text; in the end exactly what the engine says."""
    await chat.ask(f"survey {STEPWISE}")
    for stop in THOUGHT_STOPS:
        await expect(chat.turn.locator(".reasoning .thought")).to_contain_text(stop)
        chat.open_gate(stop)
    await expect(chat.step("ledger")).to_have_class("fail")
    await expect(chat.step("survey")).to_have_class("start")
    await expect(chat.step("ledger").locator(".finding")).to_contain_text("the ledger of 1888 is sealed")
    await expect(chat.text).to_have_text("One moment.")
    chat.open_gate("survey")
    await expect(chat.step("survey")).to_have_class("ok")
    await chat.read_along()
    await chat.over()
    done = (await chat.log())[-1]
    assert done["type"] == "done"
    paragraphs = await chat.text.locator("p").all_text_contents()
    assert "\n\n".join(paragraphs) == done["content"] == f"One moment.\n\n{MARKUP} {LONG}"

    states = await chat.seen()
    thoughts = list(dict.fromkeys(str(state["thought"]) for state in states if state["thought"]))
    assert len(thoughts) > 1
    assert [text for text in thoughts if not THOUGHT.startswith(text)] == []
    assert not any(state["open"] for state in states)
    assert_grown(states, await chat.shown())
    assert len({text for state in states if state["live"] and (text := str(state["text"]))}) > 5

    await chat.step("Thought").locator("summary").click()
    await expect(chat.step("Thought").locator("div.thought")).to_have_text(THOUGHT)
    await chat.step("survey").locator("summary").click()
    await expect(chat.step("survey").locator("dd").first).to_contain_text('"town": "<u>Old</u> Town"')
    await expect(chat.step("survey").locator("dd").last).to_contain_text("<b onclick=alert(1)>loud</b>")


async def test_markup_in_what_anybody_wrote_is_text(chat: Chat) -> None:
    """In an answer, a thought, arguments, a result, a question and a title: no element is made of any of it."""
    chat.open_gate()
    await chat.ask(f"survey wide {MARKUP}")
    await chat.over()
    await expect(chat.page.locator(".question")).to_have_text(f"survey wide {MARKUP}")
    for place in ("pre", "th", "td em", "ol > li", "ul > li strong"):
        await expect(chat.text.locator(place).first).to_contain_text(MARKUP)
    await expect(chat.conversation(MARKUP[:40])).to_be_visible()
    for _ in range(2):  # as it came, and as it was stored
        await chat.unfold()
        made = chat.page.locator("#turns, #conversations, #title").locator("img, script, b, i, u, s, a, [onclick]")
        await expect(made).to_have_count(0)
        assert await chat.page.title() == "dualclaw"
        await chat.reload()
        await expect(chat.text).to_contain_text(MARKUP)


async def test_stop_ends_the_run_and_keeps_its_text(chat: Chat) -> None:
    """The run is CANCELLED, the text so far stays, also after a reload, and the next question is answered."""
    await chat.ask("hang")
    await expect(chat.text).to_have_text("So far, so")
    await chat.page.locator("#stop").click()
    await chat.over()
    await expect(chat.turn.locator(".foot")).to_contain_text("Stopped")
    await chat.shows("So far, so")
    assert [run["state"] for run in await chat.runs()] == ["RUN_STATE_CANCELLED"]
    await expect(chat.page.locator("#question")).to_be_focused()
    await chat.reload()
    await expect(chat.turn.locator(".foot")).to_contain_text("Stopped")
    await chat.shows("So far, so")
    await chat.ask("more")
    await expect(chat.text).to_have_text("You said more")
    await chat.over()
    await expect(chat.page.locator("#turns > *")).to_have_count(4)
    assert len({run["conversation_id"] for run in await chat.runs()}) == 1


async def test_a_stop_on_a_broken_line_is_sent_when_the_line_is_back(chat_on_own_gateway: Chat) -> None:
    """Pressed while the gateway is away, the button still ends the run."""
    chat = chat_on_own_gateway
    await chat.ask("hang")
    await expect(chat.text).to_have_text("So far, so")
    chat.web.kill()
    await expect(chat.page.locator("#status")).to_have_text("Connection lost, reconnecting")
    await chat.page.locator("#stop").click()
    chat.restart_web()
    await chat.over()
    assert [run["state"] for run in await chat.runs()] == ["RUN_STATE_CANCELLED"]


async def test_a_killed_gateway_costs_no_character(chat_on_own_gateway: Chat) -> None:
    """Killed in mid-answer and started again: the page comes back by itself; every text shown was a beginning."""
    chat = chat_on_own_gateway
    await chat.ask(f"slow {STEPWISE}")
    await expect(chat.text).to_contain_text("number 10 ")
    chat.web.kill()
    await expect(chat.page.locator("#status")).to_have_text("Connection lost, reconnecting")
    assert len(await chat.shown()) < len(LONG)
    chat.restart_web()
    await chat.read_along()
    await chat.over()
    await expect(chat.page.locator("#status")).to_be_empty()
    assert (await chat.log())[-1]["content"] == LONG
    await chat.shows(LONG)
    assert_grown(await chat.seen(), LONG)


async def test_a_killed_engine_costs_no_character(chat_on_own_engine: Chat) -> None:
    """Killed in mid-answer and started again: the engine withdraws its text and writes it anew, unnoticed."""
    chat = chat_on_own_engine
    await chat.ask(f"slow {STEPWISE}")
    await expect(chat.text).to_contain_text("number 10 ")
    chat.engine.kill()
    assert len(await chat.shown()) < len(LONG)
    chat.restart_engine()
    await chat.read_along()
    await chat.over()
    log = await chat.log()
    assert [event["content"] for event in log if event["type"] == "rewind"] == [""]
    assert log[-1]["content"] == LONG
    await chat.shows(LONG)
    assert_grown(await chat.seen(), LONG)


async def test_a_run_is_found_again_after_a_reload(chat: Chat) -> None:
    """Reloaded or opened from the list in another tab, a conversation shows its run going on, and its end."""
    await chat.ask("survey")
    await expect(chat.step("survey")).to_have_class("start")
    await expect(chat.conversation("survey")).to_contain_text("in progress")
    await chat.reload()
    await expect(chat.step("survey")).to_have_class("start")
    other = await chat.other()
    await other.conversation("survey").locator(".open").click()
    for one in (chat, other):
        await expect(one.step("survey")).to_have_class("start")
        await expect(one.step("ledger")).to_have_class("fail")
        await expect(one.page.locator("#stop")).to_be_visible()
    chat.open_gate()
    for one in (chat, other):
        await one.over()
        assert await one.page.locator("#turns > .question").all_text_contents() == ["survey"]
        await expect(one.step("survey")).to_have_class("ok")
        await expect(one.conversation("survey")).not_to_contain_text("in progress")
    live = await chat.page.locator("#turns").inner_text()
    await expect(other.page.locator("#turns")).to_have_js_property("innerText", live)
    await chat.reload()
    await expect(chat.page.locator("#turns")).to_have_js_property("innerText", live)


async def test_conversations_stay_apart(chat: Chat) -> None:
    """New, list, switch, delete: each shows its own, the list tells what goes on, and a run left alone goes on."""
    page = chat.page
    await chat.ask("survey")
    await expect(chat.step("survey")).to_have_class("start")
    await page.locator("#new").click()
    await expect(page.locator("#empty")).to_be_visible()
    await expect(page.locator("#turns > *")).to_have_count(0)
    await expect(page.locator("#question")).to_be_focused()
    await chat.ask("hello")
    await chat.over()
    await expect(chat.conversation("hello")).to_have_class("current")
    await expect(chat.conversation("survey")).to_contain_text("in progress")
    await chat.conversation("survey").locator(".open").click()
    await expect(chat.step("survey")).to_have_class("start")
    assert await page.locator(".question").all_text_contents() == ["survey"]
    await chat.conversation("hello").locator(".open").click()
    await expect(chat.text).to_have_text("You said hello")
    chat.open_gate()
    await expect(chat.conversation("survey")).not_to_contain_text("in progress")
    assert await page.locator(".question").all_text_contents() == ["hello"]
    await chat.conversation("hello").hover()
    await chat.conversation("hello").locator(".remove").click()
    await expect(chat.conversation("hello").locator(".remove")).to_have_text("Delete?")
    await chat.conversation("hello").locator(".remove").click()
    await expect(chat.conversation("hello")).to_have_count(0)
    await expect(page.locator("#empty")).to_be_visible()
    await chat.conversation("survey").locator(".open").click()
    await expect(chat.text).to_contain_text(LONG[-20:])


async def test_a_failure_is_told_and_stays_told(chat: Chat) -> None:
    """A run that fails keeps its text and says why, also after a reload."""
    await chat.ask("fail")
    await chat.over()
    await expect(chat.turn.get_by_role("alert")).to_contain_text("The key is not valid.")
    await chat.reload()
    await expect(chat.turn.locator(".finding")).to_contain_text("The key is not valid.")
    await expect(chat.text).to_have_text("It begins.")


async def test_a_question_asked_of_no_engine_waits_for_one(chat_on_own_engine: Chat) -> None:
    """Asked while the engine is being restarted, a question is answered once, and nobody presses anything."""
    chat = chat_on_own_engine
    chat.engine.kill()
    await chat.ask("again")
    await expect(chat.page.locator("#status")).to_have_text("Connection lost, reconnecting")
    chat.restart_engine()
    await expect(chat.text).to_have_text("You said again")
    await chat.over()
    await expect(chat.page.locator(".question")).to_have_count(1)
    assert len(await chat.runs()) == 1


async def test_a_refused_question_is_not_lost(chat: Chat) -> None:
    """Asked while another tab's question is at work, it is refused with the reason and back in its field."""
    await chat.ask("hello")
    await chat.over()
    other = await chat.other()
    await other.page.goto(chat.page.url)
    await expect(other.text).to_have_text("You said hello")
    await chat.page.bring_to_front()
    await chat.ask("hang")
    await expect(chat.text).to_have_text("So far, so")
    await other.ask("wait")
    await expect(other.turn.get_by_role("alert")).to_be_visible()
    await expect(other.page.locator("#question")).to_have_value("wait")
    await chat.page.bring_to_front()
    await chat.page.locator("#stop").click()
    await chat.over()
    await other.page.keyboard.press("Enter")
    await expect(other.text).to_have_text("You said wait")


async def test_the_keyboard_reaches_everything(chat: Chat) -> None:
    """Tab goes through the page in reading order; Enter sends, Shift + Enter and an input method's Enter do not."""
    page = chat.page
    question = page.locator("#question")
    await expect(question).to_be_focused()
    await page.keyboard.type("one")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("two")
    composing = "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true})"
    await question.evaluate(f"(element) => element.dispatchEvent({composing})")
    await expect(question).to_have_value("one\ntwo")
    await expect(page.locator("#turns > *")).to_have_count(0)
    await page.keyboard.press("Enter")
    await chat.over()
    assert await page.locator(".question").text_content() == "one\ntwo"
    await chat.shows("You said one\ntwo")
    await expect(chat.conversation("one")).to_be_visible()

    await page.locator(".skip").focus()
    order = []
    for _ in range(6):
        await page.keyboard.press("Tab")
        order.append(await page.evaluate("() => document.activeElement.id || document.activeElement.className"))
    assert order == ["new", "open", "remove", "scroll", "copy", "question"]
    address = page.url
    await page.locator(".skip").focus()
    await page.keyboard.press("Enter")
    await expect(question).to_be_focused()
    assert page.url == address
    await chat.shows("You said one\ntwo")


async def test_a_screen_reader_is_told_what_happens(chat: Chat) -> None:
    """Names and roles; words of a few kinds are announced, and the answer once: no token is read aloud by itself."""
    await chat.page.evaluate(SAID)
    await chat.ask("survey")
    await expect(chat.step("survey")).to_have_class("start")
    page = chat.page
    await expect(page.get_by_role("log", name="Conversation").get_by_role("article", name="Answer")).to_be_visible()
    await expect(page.get_by_role("article", name="Question")).to_have_text("survey")
    assert await chat.text.evaluate("(text) => text.closest('[aria-live]').ariaLive") == "off"
    await expect(chat.text).to_have_attribute("aria-busy", "true")
    await expect(page.get_by_role("status")).to_have_count(1)
    await expect(page.get_by_role("button", name="Stop the answer")).to_be_visible()
    await expect(chat.step("survey").locator("summary")).to_contain_text("survey, running")
    await expect(chat.step("ledger").locator("summary")).to_contain_text("ledger, failed")
    summary = chat.step("survey").locator("summary")
    await summary.focus()
    await page.keyboard.press("Enter")
    failed = await chat.step("ledger").element_handle()
    # A complete answer makes old news of what waits to be said, so the news is awaited first.
    await expect(page.locator("#told")).to_contain_text("ledger failed")
    chat.open_gate()
    await expect(summary).to_contain_text("survey, done")
    await chat.over()
    await expect(summary).to_be_focused()
    assert await failed.evaluate("(row) => row.isConnected")  # told once, not again at the end
    await expect(chat.step("survey").locator("dd")).to_have_count(2)
    await expect(chat.step("survey").locator("dd").last).to_be_visible()
    await expect(page.locator("#told")).to_contain_text("Answer: One moment.")
    said = await page.evaluate("() => window.said")
    assert "survey is running" in " ".join(said)
    assert "ledger failed: ledger failed." in " ".join(said)
    assert len(said) <= 8  # the answer alone came in dozens of pieces


async def test_the_page_fits_a_phone_and_the_night(chat: Chat) -> None:
    """Light and dark, 1200 and 360 pixels: nothing makes the page scroll sideways, and all text has contrast 4.5."""
    chat.open_gate()
    page = chat.page
    await page.locator("#question").fill("survey wide " + "w" * 200)
    await page.keyboard.press("Enter")
    await chat.over()
    await expect(chat.turn.locator(".foot")).not_to_be_empty()
    await chat.unfold()
    await expect(chat.text.locator("ol > li > ul > li > code")).to_be_visible()
    await expect(chat.text.locator("table tr")).to_have_count(2)
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        await page.emulate_media(color_scheme=scheme)
        for width in (1200, 360):
            await page.set_viewport_size({"width": width, "height": 740})
            for box in ("html", "#scroll", "#conversations"):
                fits = "(element) => element.scrollWidth <= element.clientWidth"
                assert await page.locator(box).evaluate(fits), (box, scheme, width)
        for selector, contrast, ground in await page.evaluate(CONTRAST, READ):
            assert contrast >= 4.5, (selector, scheme)
            assert (ground > 0.5) is (scheme == "light"), (selector, scheme)

    menu, sidebar = page.locator("#menu"), page.locator("#sidebar")
    await expect(sidebar).to_be_hidden()
    await menu.click()
    await expect(sidebar).to_be_visible()
    await expect(page.locator("#new")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(sidebar).to_be_hidden()
    await expect(menu).to_be_focused()
    await menu.click()
    await chat.conversation("survey").locator(".open").click()
    await expect(sidebar).to_be_hidden()
    await expect(chat.text.locator("table")).to_be_visible()


async def test_a_page_without_a_key_asks_for_it(open_chat: Open, shared: Shared) -> None:
    """A wrong key is asked for again; with the right one the page works, and keeps it over a reload."""
    chat = await open_chat(shared.engine, shared.web, shared.settings, shared.folder)
    dialog = chat.page.get_by_role("dialog")
    for key in ("wrong", shared.tenant()):
        await expect(dialog).to_be_visible()
        await expect(chat.page.get_by_text("not accepted")).to_be_visible(visible=key != "wrong")
        await chat.page.get_by_label("API key").fill(key)
        await chat.page.keyboard.press("Enter")
    await expect(chat.page.locator("#about")).to_have_text("Counts houses.")
    await expect(dialog).to_be_hidden()
    await chat.page.reload()
    await expect(chat.page.locator("#about")).to_have_text("Counts houses.")
    await chat.ask("hello")
    await expect(chat.text).to_have_text("You said hello")

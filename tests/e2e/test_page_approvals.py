"""What a run asks people, on the page in a real browser: approved, rejected, changed, answered; also after a reload."""

from collections.abc import Iterator

import pytest
import pytest_asyncio
from playwright.async_api import Locator, expect

from tests.toolchains import require

from .approvals import BIG, notes, settings_of
from .chat import Chat, Shared
from .conftest import Launcher, Open

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """An engine whose agent asks, and a gateway."""
    require("chromium")
    shared = Shared(tmp_path_factory.mktemp("clerk"), settings_of)
    yield shared
    shared.web.stop()
    shared.engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def chat(open_chat: Open, shared: Shared) -> Chat:
    """A page of a tenant of the test's own."""
    tenant = shared.tenant()
    return await open_chat(shared.engine, shared.web, shared.settings, shared.folder, tenant=tenant, key=tenant)


def card(chat: Chat, text: str = "") -> Locator:
    """The open questions that hold a text."""
    return chat.page.locator(".card", has_text=text)


def noted(chat: Chat) -> list[str]:
    """The notes of the page's tenant."""
    return notes(chat.gate.parent, chat.gate.name)


async def press(where: Locator, name: str) -> None:
    """Press a button of a card."""
    await where.get_by_role("button", name=name, exact=True).click()


async def test_an_approval_is_given_on_its_card_and_the_answer_goes_on_below(chat: Chat) -> None:
    """The card shows prompt and exact arguments; approved once, the tool runs once and the text stays whole."""
    await chat.ask("note")
    await expect(card(chat)).to_contain_text("note waits for approval")
    await expect(card(chat)).to_contain_text("May this be noted?")
    await expect(card(chat).locator("pre")).to_have_text(f'{{"text": "milk", "number": {BIG}}}')
    await expect(chat.step("note")).to_have_class("held")
    assert noted(chat) == []
    await press(card(chat), "Approve")
    await expect(chat.step("note")).to_have_class("ok")
    await chat.over()
    await expect(card(chat)).to_have_count(0)
    await expect(chat.step("note").locator(".brief")).to_contain_text(f"number: {BIG}")
    await expect(chat.turn.locator(".answer")).to_have_text(["One moment.", "Result: noted milk"])
    assert noted(chat) == [f"milk {BIG}"]
    await chat.reload()
    await expect(chat.text).to_contain_text("Result: noted milk")
    await expect(chat.step("note").locator(".brief")).to_contain_text(f"number: {BIG}")


async def test_a_question_is_still_there_after_a_reload_and_in_another_tab(chat: Chat) -> None:
    """Reloaded, the card is back; decided in one tab, both go on and show the same."""
    await chat.ask("note")
    await expect(card(chat)).to_be_visible()
    await chat.reload()
    await expect(card(chat)).to_contain_text("May this be noted?")
    other = await chat.other()
    await other.conversation("note").locator(".open").click()
    await expect(card(other)).to_be_visible()
    await card(other).get_by_label("Comment").fill("not today")
    await press(card(other), "Reject")
    for one in (chat, other):
        await expect(one.step("note")).to_have_class("fail")
        await one.over()
        await expect(card(one)).to_have_count(0)
        await expect(one.step("note").locator(".finding")).to_contain_text("not today")
    assert noted(chat) == []


async def test_changed_arguments_are_run_exactly(chat: Chat) -> None:
    """The text of the arguments is edited as it is, big numbers included; what does not fit is said on the card."""
    await chat.ask("note")
    await press(card(chat), "Change the arguments")
    field = card(chat).get_by_label("The arguments as one JSON object")
    await expect(field).to_have_value(f'{{"text": "milk", "number": {BIG}}}')
    await field.fill('{"number": 1}')
    await press(card(chat), "Approve with these")
    await expect(card(chat).get_by_role("alert")).to_contain_text("'text' is a required property")
    await field.fill(f'{{"text": "cream", "number": {BIG + 2}}}')
    await press(card(chat), "Approve with these")
    await chat.over()
    assert noted(chat) == [f"cream {BIG + 2}"]
    await chat.unfold()
    await expect(chat.step("note").locator("dd").first).to_contain_text("cream")


async def test_two_approvals_are_decided_one_by_one(chat: Chat) -> None:
    """Nothing runs before both have their answer; what is half typed on one card outlives the other's answer."""
    await chat.ask("both")
    await expect(card(chat)).to_have_count(2)
    await press(card(chat, "eggs"), "Give the result myself")
    await card(chat).get_by_label("The result").fill("noted by hand")
    await press(card(chat, "milk"), "Approve")
    await expect(card(chat)).to_have_count(1)
    assert noted(chat) == []
    await expect(chat.turn.locator(".answer").first).to_have_text("Two notes.")
    await expect(card(chat).get_by_label("The result")).to_have_value("noted by hand")
    await press(card(chat), "Give this result")
    await chat.over()
    assert noted(chat) == [f"milk {BIG}"]
    await expect(chat.text).to_have_text("Result: noted by hand")


async def test_a_message_answers_the_one_question_and_never_an_approval(chat: Chat) -> None:
    """With an approval open nothing is sent and what was typed stays; a question takes it as its answer."""
    await chat.ask("note")
    await expect(card(chat)).to_be_visible()
    await chat.ask("yes, do it")
    await expect(chat.page.locator("#send")).to_be_disabled()
    await expect(chat.page.locator("#question")).to_have_value("yes, do it")
    await press(card(chat), "Skip")
    await chat.over()
    assert noted(chat) == []
    await chat.page.locator("#question").fill("")
    await chat.ask("ask")
    await expect(card(chat)).to_contain_text("Which shop?")
    await chat.ask("the market")
    await chat.over()
    await expect(chat.text).to_have_text("Result: the market")
    assert len(await chat.runs()) == 2


async def test_choices_are_buttons_and_their_markup_is_text(chat: Chat) -> None:
    """A question with choices is answered by pressing one; nothing of its text becomes an element."""
    await chat.ask("which")
    await expect(card(chat).locator("b")).to_have_count(0)
    await press(card(chat), "<b>store</b>")
    await chat.over()
    await expect(chat.text).to_have_text("Result: <b>store</b>")
    await expect(chat.text.locator("b")).to_have_count(0)


async def test_offered_answers_stand_beside_ones_own(chat: Chat) -> None:
    """Where choices are offers, one may be pressed or something else be typed; a question may be skipped."""
    for answer in ("store", "the bakery"):
        await chat.ask("offer")
        if answer == "store":
            await press(card(chat), answer)
        else:
            await card(chat).get_by_label("Your answer").fill(answer)
            await press(card(chat), "Answer")
        await chat.over()
        await expect(chat.text).to_have_text(f"Result: {answer}")
    await chat.ask("ask")
    await press(card(chat), "Skip")
    await chat.over()
    await expect(chat.step("ask_user")).to_have_class("fail")


async def test_an_answer_given_on_a_broken_line_is_given_once(
    open_chat: Open, shared: Shared, launch: Launcher
) -> None:
    """Pressed while the gateway is away, the approval arrives when it is back, once, and the run is followed on."""
    web = launch("dualclaw_clients.web", DUALCLAW_WEB_LISTEN="127.0.0.1:0", DUALCLAW_ENGINE=shared.engine.address)
    tenant = shared.tenant()
    chat = await open_chat(shared.engine, web, shared.settings, shared.folder, tenant=tenant, key=tenant)
    await chat.ask("note")
    await expect(card(chat)).to_be_visible()
    chat.web.kill()
    await press(card(chat), "Approve")
    await expect(chat.page.locator("#status")).to_have_text("Connection lost, reconnecting")
    chat.restart_web()
    await chat.over()
    await expect(chat.page.locator("#status")).to_be_empty()
    assert noted(chat) == [f"milk {BIG}"]
    await expect(chat.turn.locator(".answer")).to_have_text(["One moment.", "Result: noted milk"])


async def test_stop_ends_a_run_that_waits(chat: Chat) -> None:
    """Stopped instead of answered: the card goes, the text stays, nothing was run."""
    await chat.ask("note")
    await expect(card(chat)).to_be_visible()
    await chat.page.locator("#stop").click()
    await chat.over()
    await expect(card(chat)).to_have_count(0)
    await expect(chat.turn.locator(".foot")).to_contain_text("Stopped")
    await expect(chat.turn.locator(".answer").first).to_have_text("One moment.")
    assert noted(chat) == []


async def test_cards_are_for_everybody(chat: Chat) -> None:
    """Named groups and controls, reached by the keyboard; readable by night and on a phone."""
    await chat.ask("note")
    group = chat.page.get_by_role("group", name="note waits for approval")
    await expect(group).to_be_visible()
    await chat.page.set_viewport_size({"width": 360, "height": 740})
    assert await chat.page.locator("html").evaluate("(element) => element.scrollWidth <= element.clientWidth")
    await group.get_by_label("Comment").focus()
    for name in ("Comment (may be empty)", "rest of this conversation", "Approve"):
        focused = chat.page.locator(":focus")
        label = await focused.get_attribute("aria-label") or await focused.evaluate(
            "(element) => (element.labels?.[0] || element).textContent"
        )
        assert name in label
        await chat.page.keyboard.press("Tab")
    await chat.page.keyboard.press("Shift+Tab")
    await chat.page.keyboard.press("Enter")
    await chat.over()
    assert noted(chat) == [f"milk {BIG}"]

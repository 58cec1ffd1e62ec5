"""What the page makes of sub-agents, hidden characters, time that runs out, a small model, and services away."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.toolchains import require

from .chat import Chat, Shared
from .conftest import Launcher, Open

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

AGENTS = '''
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.tool import tool
from dualclaw_server.interceptors.hitl import HitlInterceptor, Policy


@tool(effect="read")
async def archive(query: str) -> str:
    """Search."""
    return "three letters"


@tool(effect="once")
async def pay(to: str) -> str:
    """Pay."""
    return "paid"


@tool(effect="once")
async def quick(to: str) -> str:
    """Pay, if somebody is there to say so."""
    return "paid"


RESEARCHER = Agent("researcher", description="Finds out.", instructions="You research", tools=[archive])
AGENT = Agent(
    "lead",
    description="Leads.",
    instructions="You lead",
    tools=[pay, quick],
    sub_agents=[RESEARCHER],
    interceptors=[HitlInterceptor([Policy("pay", expires_in=7200), Policy("quick", expires_in=8)])],
)
'''
TRICK = "Bob\u202e ,eciLA\u200b\u2066"
HOSTILE = [
    "<script>document.title='owned'</script>",
    "<img src=https://example.org/a.png onerror=\"document.title='owned'\">",
    "![i](https://example.org/b.png) [l](javascript:alert(1)) <javascript:alert(1)>",
    "<svg/onload=document.title='owned'> <iframe srcdoc='<script>top.document.title=1</script>'></iframe>",
    '<a href="https://example.org/" ping=x>l</a> <form action=https://example.org><button>b</button></form>',
    "<style>*{display:none}</style><link rel=stylesheet href=https://example.org/c.css><base href=//example.org>",
    "```html\"><img/src=x/onerror=document.title='owned'>\n</code></pre><script>document.title='owned'</script>\n```",
    "| <img src=x onerror=document.title='owned'> | b |\n|---|---|\n| `<b>` | **<u>c</u>** |",
    "\u2028<math><mtext></table></math> &lt;b&gt; \x00 \u202eevil\u202c <\u0130mg> \ufeff<img\u00a0src=x>",
]
TURNS: list[dict[str, object]] = [
    {
        "when": {"system": "^You research", "step": 0},
        "say": [{"reasoning": "Letters."}, {"call": "archive", "args": {"query": "mill"}}],
    },
    {"when": {"system": "^You research"}, "say": [{"text": "Found {{result}}."}]},
    {"when": {"user": "delegate", "step": 0}, "say": [{"call": "researcher", "args": {"request": "the mill"}}]},
    {"when": {"user": "pay", "step": 0}, "say": [{"call": "pay", "args": {"to": TRICK}}]},
    {"when": {"user": "quick", "step": 0}, "say": [{"call": "quick", "args": {"to": "Ann"}}]},
    {"when": {"user": "hostile"}, "say": [{"text": "\n\n".join(HOSTILE), "chunk": 7, "delay": 0.001}]},
    {"when": {"step": 1}, "say": [{"text": "It is so: {{result}}"}]},
    {"say": [{"text": "You said {{user}}"}]},
]


def settings_of(folder: Path, **more: str) -> dict[str, str]:
    """Write script and agents; returns the settings of an engine whose model has the name of the small one."""
    (folder / "detail_agents.py").write_text(AGENTS, "utf-8")
    (folder / "details.json").write_text(json.dumps({"name": "local", "turns": TURNS}), "utf-8")
    return {
        "DUALCLAW_LISTEN": "127.0.0.1:0",
        "DUALCLAW_STORE": "memory:",
        "DUALCLAW_GRACE": "0",
        "DUALCLAW_MODEL": f"scripted:{folder / 'details.json'}",
        "DUALCLAW_AGENTS": "detail_agents:AGENT",
        **more,
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Services for tests that kill none."""
    require("chromium")
    shared = Shared(tmp_path_factory.mktemp("details"), settings_of)
    yield shared
    shared.web.stop()
    shared.engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def chat(open_chat: Open, shared: Shared) -> Chat:
    """A page of a tenant of the test's own."""
    tenant = shared.tenant()
    return await open_chat(shared.engine, shared.web, shared.settings, shared.folder, tenant=tenant, key=tenant)


async def test_steps_of_a_sub_agent_stand_below_the_step_that_called_it(chat: Chat) -> None:
    """They have a list of their own in that step's row, named after the agent, and stay there when it ends."""
    await chat.ask("delegate")
    await chat.over()
    rows = chat.turn.locator(".steps:not(.inner) > li")
    await expect(rows).to_have_count(1)
    inner = chat.turn.get_by_role("list", name="Steps of researcher").locator("> li")
    await expect(inner.locator(".title")).to_have_text(["Thought", "archive"])
    await expect(rows.first).to_have_class("ok")
    await expect(inner.last).to_have_class("ok")


async def test_text_withdrawn_twice_does_not_flicker(chat: Chat) -> None:
    """What was shown stays until the new text has caught up or differs, also if that is withdrawn half way."""
    shown = await chat.page.evaluate(
        """async () => {
          const { Turn } = await import("/page/turn.js");
          const turn = new Turn(), shown = [];
          turn.setLive(true);
          for (const [type, content] of [["delta", "abcdef"], ["rewind", ""], ["delta", "abc"], ["rewind", ""],
            ["delta", "ab"], ["delta", "cdefg"], ["rewind", "abc"], ["delta", "x"]]) {
            turn.apply({ type, content });
            turn.drawNow();
            shown.push(turn.answer.textContent);
          }
          return shown;
        }"""
    )
    assert shown == [*["abcdef"] * 5, "abcdefg", "abcdefg", "abcx"]


async def test_what_is_approved_is_what_is_read(chat: Chat) -> None:
    """Characters that hide or reorder others are spelt out in arguments; left to themselves, they would lie."""
    await chat.ask("pay")
    shown = chat.page.locator(".card pre")
    await expect(shown).to_have_text('{"to": "BobU+202E ,eciLAU+200BU+2066"}')
    await expect(shown.locator(".hidden-character")).to_have_count(3)
    await expect(chat.step("pay").locator(".brief")).to_contain_text("BobU+202E")
    await expect(chat.page.locator(".card")).to_contain_text("left)")
    await chat.page.locator("#stop").click()
    await chat.over()


async def test_a_question_nobody_answers_in_time_goes_by_itself(chat: Chat) -> None:
    """The engine decides when it is too late; then the card goes, the step says why, and the focus is kept."""
    await chat.ask("quick")
    card = chat.page.locator(".card")
    await expect(card).to_contain_text("Answer by")
    await card.get_by_label("Comment").focus()
    await chat.over()
    await expect(card).to_have_count(0)
    await expect(chat.step("quick")).to_have_class("fail")
    await expect(chat.step("quick").locator(".finding")).to_contain_text("Nobody answered in time.")
    await expect(chat.page.locator("#question")).to_be_focused()


async def test_focus_stays_on_the_page_while_cards_are_decided(chat: Chat) -> None:
    """Decided by the keyboard, a card hands the focus on instead of dropping it."""
    await chat.ask("pay")
    await chat.page.get_by_role("button", name="Reject", exact=True).focus()
    await chat.page.keyboard.press("Enter")
    await chat.over()
    await expect(chat.page.locator("#question")).to_be_focused()


async def test_nothing_a_model_writes_becomes_more_than_text(chat: Chat) -> None:
    """Scripts, handlers, frames, forms, styles, links, remote pictures: shown as written, nothing asked of anybody."""
    asked: list[str] = []
    chat.page.on("request", lambda request: asked.append(request.url))
    await chat.ask("hostile")
    await chat.over()
    made = (
        "img, script, svg, iframe, a, form, button, style, link, base, math, u, b, [onerror], [onload], [href], [src]"
    )
    await expect(chat.text.locator(made)).to_have_count(0)
    await expect(chat.text).to_contain_text("![i](https://example.org/b.png) [l](javascript:alert(1))")
    await expect(chat.text).to_contain_text("<iframe srcdoc=")
    assert await chat.page.title() == "dualclaw"
    assert [url for url in asked if not url.startswith(chat.web.address)] == []


async def test_the_small_model_is_told_until_somebody_knows(chat: Chat) -> None:
    """A line says that it is often wrong and how to set a provider; dismissed, it stays away."""
    note = chat.page.locator("#notices")
    await expect(note).to_contain_text("often wrong")
    await expect(note).to_contain_text("DUALCLAW_MODEL=")
    await note.get_by_role("button", name="Got it").click()
    await expect(note).to_be_empty()
    await chat.page.reload()
    await expect(chat.page.locator("#about")).to_have_text("Leads.")
    await expect(note).to_be_empty()


async def test_what_is_away_is_named_truly_and_the_page_comes_back(
    open_chat: Open, launch: Launcher, tmp_path: Path
) -> None:
    """Engine away, then the gateway: each by its name, no store is blamed; when they are back the line goes."""
    require("chromium")
    settings = settings_of(tmp_path)
    engine = launch("dualclaw_server", **settings)
    web = launch("dualclaw_clients.web", DUALCLAW_WEB_LISTEN="127.0.0.1:0", DUALCLAW_ENGINE=engine.address)
    chat = await open_chat(engine, web, settings, tmp_path)
    engine.kill()
    await chat.page.reload()
    away = chat.page.locator("#notices").get_by_role("alert")
    await expect(away).to_contain_text("The engine cannot be reached.")
    await expect(away).to_contain_text("dualclaw-server")
    assert "store" not in (await chat.page.locator("body").inner_text()).lower()
    web.kill()
    await expect(away).to_contain_text("The gateway cannot be reached.")
    chat.restart_web()
    await expect(away).to_contain_text("The engine cannot be reached.")
    chat.restart_engine()
    await expect(away).to_have_count(0)
    await expect(chat.page.locator("#about")).to_have_text("Leads.")


async def test_older_conversations_come_page_by_page_and_are_deleted_by_the_keyboard(chat: Chat) -> None:
    """Thirty are shown, older ones when asked for, each once; after a deletion the focus is on a neighbour."""
    for number in range(33):
        message = {"role": "ROLE_USER", "parts": [{"text": f"question {number:02}"}]}
        answer = await chat.page.request.post(f"{chat.web.address}/v1/runs", data={"message": message})
        assert answer.ok
    await chat.page.reload()
    names = chat.page.locator("#conversations .name")
    await expect(names).to_have_count(30)
    await chat.page.locator("#older").click()
    await expect(names).to_have_count(33)
    await expect(chat.page.locator("#older")).to_be_hidden()
    assert await names.all_text_contents() == [f"question {number:02}" for number in range(32, -1, -1)]
    remove = chat.conversation("question 20").locator(".remove")
    await remove.focus()
    await chat.page.keyboard.press("Enter")
    await expect(remove).to_have_text("Delete?")
    await chat.page.keyboard.press("Enter")
    await expect(names).to_have_count(32)
    await expect(chat.conversation("question 19").locator(".open")).to_be_focused()

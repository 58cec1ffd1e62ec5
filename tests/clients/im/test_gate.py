"""The gate between the engine and the service before it, over real HTTP."""

import asyncio
import contextlib
import json
import socket

import pytest

from dualclaw_clients.im.app import open_relay
from dualclaw_clients.im.connector import ChatKey, MessageKey
from dualclaw_clients.im.gate import Gate, GateError, LegacyError
from dualclaw_clients.im.legacy import MAX_BYTES, LegacyClient
from dualclaw_clients.settings import ImSettings

KEY = MessageKey(ChatKey("test", "b1", "c1"), "m1")


def reply(text: object) -> tuple[int, bytes]:
    """A good answer of the old service."""
    return 200, json.dumps({"text": text}).encode()


def settings(core: str, url: str = "", engine: str = "127.0.0.1:1") -> ImSettings:
    """Settings as the environment would give them."""
    return ImSettings(engine=engine, use_engine_core=core, legacy_url=url)


@pytest.mark.parametrize(
    ("value", "open_to", "closed_to"),
    [
        ("", [], ["acme", ""]),
        ("off", [], ["acme"]),
        (" OFF ", [], ["acme"]),
        ("0", [], ["acme"]),
        ("on", ["acme", ""], []),
        ("True", ["acme"], []),
        ("acme, beta,", ["acme", "beta"], ["gamma", "", "acme, beta"]),
    ],
)
def test_the_gate_is_off_on_or_a_list(value, open_to, closed_to):
    """Off is the default; a list opens for its tenants and nobody else."""
    gate = Gate.parse(value)
    assert all(gate.lets_through(tenant) for tenant in open_to)
    assert not any(gate.lets_through(tenant) for tenant in closed_to)


@pytest.mark.parametrize("value", ["on,acme", "acme,off", ",", " , "])
def test_a_switch_among_tenants_is_an_error(value):
    """What on and a tenant together mean is not guessed."""
    with pytest.raises(GateError, match="not a mixture"):
        Gate.parse(value)


@pytest.mark.parametrize("core", ["off", "acme"])
async def test_messages_without_anybody_to_answer_stop_the_start(new_platform, tmp_path, core):
    """Off, or on for some, without the old service's address names both ways out, before anything is opened."""
    with pytest.raises(GateError) as caught:
        async with open_relay(settings(core), [new_platform(gated=True)], state=str(tmp_path / "s")):
            pass
    assert "IM_USE_ENGINE_CORE=on" in str(caught.value)
    assert "IM_LEGACY_URL" in str(caught.value)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("url", ["bots.example.com/x", "ftp://example.com", "http://"])
async def test_an_address_that_is_none_stops_the_start(new_platform, tmp_path, url):
    """A wrong IM_LEGACY_URL is found at start and not at the first message."""
    with pytest.raises(GateError, match="IM_LEGACY_URL"):
        async with open_relay(settings("off", url), [new_platform(gated=True)], state=":memory:"):
            pass


async def test_while_the_gate_is_off_the_old_service_answers(new_platform, message, ask, legacy, fake_engine):
    """It gets the five agreed fields, its text goes to the chat once, and the engine is not asked."""
    platform = new_platform(gated=True)
    legacy.replies = [reply("old answer")]
    async with open_relay(settings("off", legacy.url, fake_engine.target), [platform], state=":memory:") as relay:
        assert await ask(relay, platform, message("m1", "hi"))
        assert (await relay.accept(platform, message("m1", "hi"))).duplicate
    assert platform.texts() == ["old answer"]
    assert legacy.requests == [
        {"platform": "test", "chat_id": "c1", "user_id": "u1", "message_id": "m1", "text": "hi"},
    ]
    assert fake_engine.calls_of("Run") == []


async def test_a_list_sends_each_tenant_its_way(new_platform, message, answer, ask, legacy, fake_engine):
    """Listed tenants are answered by the engine, others by the old service."""
    moved, waiting = (new_platform(name, gated=True, tenant=name) for name in ("acme", "beta"))
    legacy.replies = [reply("old")]
    answer("new")
    gate = settings("acme", legacy.url, fake_engine.target)
    async with open_relay(gate, [moved, waiting], state=":memory:") as relay:
        assert await ask(relay, moved, message("m1"))
        assert await ask(relay, waiting, message("m1"))
    assert (moved.texts(), waiting.texts()) == (["new"], ["old"])


async def test_a_connector_without_a_gate_is_always_answered_by_the_engine(
    new_platform, message, answer, ask, legacy, fake_engine
):
    """The console's kind of connector ignores a gate that is off for the one beside it."""
    free, gated = new_platform("free"), new_platform("gated", gated=True)
    legacy.replies = [reply("old")]
    answer("new")
    async with open_relay(settings("off", legacy.url, fake_engine.target), [free, gated], state=":memory:") as relay:
        assert await ask(relay, free, message("m1"))
        assert await ask(relay, gated, message("m1"))
    assert (free.texts(), gated.texts()) == (["new"], ["old"])


async def test_the_gate_on_needs_no_old_service(new_platform, message, answer, ask, fake_engine):
    """With everybody moved over the engine answers alone."""
    platform = new_platform(gated=True)
    answer("new")
    async with open_relay(settings("on", engine=fake_engine.target), [platform], state=":memory:") as relay:
        assert await ask(relay, platform, message("m1"))
    assert platform.texts() == ["new"]


async def test_an_old_service_that_fails_is_told_and_can_be_tried_again(new_platform, message, ask, legacy):
    """The person gets a text, the message is failed and not lost."""
    platform = new_platform(gated=True)
    legacy.replies = [(500, b"secret stack trace"), reply("now")]
    async with open_relay(settings("off", legacy.url), [platform], state=":memory:") as relay:
        assert not await ask(relay, platform, message("m1"))
        assert await ask(relay, platform, message("m1"))
    notice, text = platform.texts()
    assert "HTTP 500" in notice
    assert "secret" not in notice
    assert text == "now"


async def test_an_empty_text_of_the_old_service_sends_nothing(new_platform, message, ask, legacy):
    """The old service may have nothing to say; that is an answer."""
    platform = new_platform(gated=True)
    legacy.replies = [reply("")]
    async with open_relay(settings("off", legacy.url), [platform], state=":memory:") as relay:
        assert await ask(relay, platform, message("m1"))
    assert platform.sent == []


@pytest.mark.parametrize(
    ("answered", "problem"),
    [
        ((200, b"<html>"), "not JSON"),
        ((200, b'["text"]'), "not {"),
        (reply(None), "not {"),
        ((302, b""), "HTTP 302"),
        ((200, b"[" * 100_000), "not JSON"),
        ((200, b" " * (MAX_BYTES + 1)), "longer than"),
        (90.0, "within 1 seconds"),
    ],
)
async def test_every_failure_of_the_old_service_has_a_type(legacy, answered, problem):
    """Whatever comes back, the caller gets LegacyError with a reason that repeats neither body nor address."""
    legacy.replies = [answered]
    async with LegacyClient(legacy.url, timeout=1 if isinstance(answered, float) else 60) as client:
        with pytest.raises(LegacyError, match=problem) as caught:
            await client.answer(KEY, "u1", "hi")
    assert "127.0.0.1" not in str(caught.value)


async def test_an_old_service_that_drips_is_cut_off(legacy):
    """The time limit is for the whole answer, not for the next byte."""

    async def drip(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(10)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(900):
            writer.write(b" ")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), 0.05)
                break
        writer.close()
        ended.set()

    ended = asyncio.Event()

    async with (
        await asyncio.start_server(drip, "127.0.0.1", 0) as server,
        LegacyClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", timeout=0.3) as client,
    ):
        with pytest.raises(LegacyError, match="within"):
            async with asyncio.timeout(40):  # the dripping goes on for longer
                await client.answer(KEY, "u1", "hi")
        await asyncio.wait_for(ended.wait(), 60)


async def test_an_old_service_that_is_gone_is_a_legacy_error():
    """A refused connection is told without the address."""
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        async with LegacyClient(url) as client:
            with pytest.raises(LegacyError, match="cannot be reached"):
                await client.answer(KEY, "u1", "hi")

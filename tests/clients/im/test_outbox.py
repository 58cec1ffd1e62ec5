"""A relay that is killed at each step of a send: nothing is lost, and nothing doubled without its mark."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dualclaw_clients.im.connector import ChatKey, Limit, MessageKey, SendError, Unit
from dualclaw_clients.im.delivery import SendLimits, sending_key_of
from dualclaw_clients.im.relay import RelayLimits
from dualclaw_clients.im.texts import ZH

PROGRAM = """
import asyncio, json, os, signal, sys
from dualclaw_clients.engine_client import EngineClient
from dualclaw_clients.im.connector import IncomingMessage, Limit, Unit
from dualclaw_clients.im.relay import Relay
from dualclaw_clients.im.state import RelayState

target, place, sent, step = sys.argv[1:]


def die_at(name):
    if name == step:
        os.kill(os.getpid(), signal.SIGKILL)


class Dying(RelayState):
    async def claim(self, *args):
        found = await super().claim(*args)
        die_at("claimed")
        return found

    async def save_request(self, *args):
        await super().save_request(*args)
        die_at("request stored")

    async def save_answer(self, *args):
        found = await super().save_answer(*args)
        die_at("answer stored")
        return found

    async def start_part(self, key, part, **more):
        await super().start_part(key, part, **more)
        die_at(f"part {part} begun")

    async def save_sent(self, key, part):
        await super().save_sent(key, part)
        die_at(f"part {part} noted")

    async def finish(self, key):
        await super().finish(key)
        die_at("done")


class Platform:
    name, claw, tenant, gated, approvers, limit = "test", "im_test", "", False, (), Limit(16, Unit.CHARACTERS)

    async def listen(self, accept):
        receipt = await accept(IncomingMessage("b1", "c1", "u1", "m1", "hello"))
        await receipt.answered()

    async def send_text(self, chat, text, sending):
        with open(sent, "a") as file:
            file.write(json.dumps([text, sending.key, sending.repeated]) + "\\n")
        die_at(f"{text[:3]} sent")


async def main():
    async with EngineClient(target) as engine, await Dying.open(place) as state:
        async with Relay(state, engine, [Platform()]) as relay:
            await relay.listen()

asyncio.run(main())
"""
PARTS = ["one is number 1\n", "two is number 2\n", "three"]
DOUBTFUL = {"part 1 begun": 1, "one sent": 1, "part 2 begun": 2, "two sent": 2}
"""Steps after which nobody knows whether a part arrived, and which part."""
KEY = MessageKey(ChatKey("test", "b1", "c1"), "m1")


async def die(fake_engine, folder: Path, step: str) -> list[tuple[str, str, bool]]:
    """Run a relay that kills itself at a step; returns what it sent."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, fake_engine.target, str(folder / "im.sqlite"), str(folder / "sent"), step,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    _, errors = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == -9, errors.decode()
    path = folder / "sent"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def marks(folder: Path) -> int:
    """How many parts of the message are marked unknown_after_send."""
    with sqlite3.connect(folder / "im.sqlite") as database:
        (unsure,) = database.execute("SELECT unsure FROM messages").fetchone()
    database.close()
    return int(unsure)


@pytest.mark.parametrize(
    "step",
    ["claimed", "request stored", "answer stored", "part 1 begun", "one sent", "part 1 noted", "part 2 begun",
     "two sent", "part 2 noted", "done"],
)  # fmt: skip
async def test_killed_at_any_step_nothing_is_lost_and_a_double_is_marked(
    relaying, new_platform, message, answer, fake_engine, tmp_path, step
):
    """The next relay sends the rest in order; the one part in doubt goes again under its key, and is marked."""
    answer("".join(PARTS))
    before = await die(fake_engine, tmp_path, step)
    platform = new_platform(limit=Limit(16, Unit.CHARACTERS))
    async with relaying(platform, limits=RelayLimits()) as relay:
        assert await relay.drain(60)
        assert (await relay.accept(platform, message("m1"))).duplicate
    doubtful = DOUBTFUL.get(step, 0)
    after = platform.texts()
    sent = [text for text, _, _ in before]
    twice = [text for text in sent if text in after]
    assert len(twice) <= 1
    assert list(dict.fromkeys([*sent, *after])) == PARTS
    if twice:
        assert twice == [PARTS[doubtful - 1]]
    assert marks(tmp_path) == bool(doubtful)
    assert [s.repeated for s in platform.sendings] == [number == doubtful for number in range(4 - len(after), 4)]
    keys = {text: key for text, key, _ in before} | {
        str(text): sending.key for text, sending in zip(after, platform.sendings, strict=True)
    }
    assert keys == {text: sending_key_of(KEY, number) for number, text in enumerate(PARTS, 1)}
    assert len({call.request.request_id for call in fake_engine.calls_of("Run")}) == 1


async def test_a_part_in_doubt_is_not_sent_again_where_that_is_set(
    relaying, new_platform, answer, fake_engine, tmp_path
):
    """With resend off a line says that something may be missing, and the rest follows."""
    answer("".join(PARTS))
    await die(fake_engine, tmp_path, "one sent")
    platform = new_platform(limit=Limit(16, Unit.CHARACTERS))
    async with relaying(platform, limits=RelayLimits(send=SendLimits(resend=False))) as relay:
        assert await relay.drain(60)
    assert platform.texts() == [ZH.maybe_sent, *PARTS[1:]]
    assert marks(tmp_path) == 1


async def test_a_send_of_which_nobody_knows_is_marked_and_goes_again_with_a_repeat(
    relaying, platform, message, answer, ask, tmp_path
):
    """Not by itself: only when the platform delivers the message once more, and then as a repeated one."""
    platform.refusals = [SendError("no answer", unknown=True)]
    answer("text")
    async with relaying(platform) as relay:
        assert not await ask(relay, platform, message("m1"))
        assert (platform.texts(), marks(tmp_path)) == ([], 1)
        assert await ask(relay, platform, message("m1"))
    assert [sending.repeated for sending in platform.sendings] == [False, True]
    assert platform.texts() == ["text"]


async def test_a_refused_part_is_in_no_doubt(relaying, platform, message, answer, ask, tmp_path):
    """It was not delivered, so the next try is no repeat and nothing is marked."""
    platform.refusals = [SendError("no")]
    answer("text")
    async with relaying(platform) as relay:
        assert not await ask(relay, platform, message("m1"))
        assert await ask(relay, platform, message("m1"))
    assert [sending.repeated for sending in platform.sendings] == [False, False]
    assert marks(tmp_path) == 0


async def test_a_platform_cannot_name_a_message_like_ours(relaying, platform, message, answer, ask):
    """Ids under which the relay keeps what a chat hears unasked are out of reach of platforms."""
    answer("ok")
    async with relaying(platform) as relay:
        for name in ("run:r1:5", "run:run:r1:5", "r1:5"):
            assert await ask(relay, platform, message(name))
            assert (await relay.accept(platform, message(name))).duplicate
    assert len(platform.sent) == 3

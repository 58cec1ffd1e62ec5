"""Tenants: what belongs to another one does not exist, whatever the ids look like."""

import asyncio

import pytest

from dualclaw.errors import EngineError
from dualclaw_server.engine.store import Fenced, RunKey, RunMessage

HOSTILE = [
    "plain",
    "it's; DROP TABLE runs; --",
    'quo"te',
    "do.ts.and.*.>",
    "nul\0after",
    "nul\0",
    "nul",
    "../../etc/passwd",
    "%_[a-z]",
    "中文 \U0001f600 e\u0301",
    "\u00e9",
    "line\nbreak\r\t",
    "x" * 5000,
    "",
    " ",
]


async def test_every_tenant_sees_only_its_own(store, make, writer):
    """The same run, conversation and request ids live side by side in many tenants."""
    for tenant in HOSTILE:
        created = await store.create(make.new("r", "c", tenant=tenant, request_id="q", title=tenant))
        assert not created.existing
        log = writer(store, make.key("r", tenant))
        await log.add(text=tenant)
        await log.end(f"answer to {tenant[:20]!r}")
    for tenant in HOSTILE:
        key = make.key("r", tenant)
        assert (await store.head(key)).key == key
        frames = await store.read(key, 0)
        assert frames[0].body == make.events(1, 1, tenant)
        assert (await store.get_conversation(tenant, "c")).title == tenant
        page = await store.list_messages(tenant, "c", page_size=0, page_token="")
        assert [message.id for message in page.items] == ["r-0", f"answer to {tenant[:20]!r}"]
        runs = await store.list_runs(tenant, states=(), conversation_id="c", page_size=0, page_token="")
        assert len(runs.items) == len((await store.list_conversations(tenant, page_size=0, page_token="")).items) == 1
    await store.delete_conversation(HOSTILE[0], "c")
    for tenant in HOSTILE[1:]:
        assert (await store.head(make.key("r", tenant))).last_seq == 2


async def test_hostile_ids_are_just_ids(store, make, writer, claim_now):
    """Run, conversation, request, signal and setting names are data."""
    for name in HOSTILE:
        new = make.new(name, f"c{name}", request_id=f"q{name}")
        await store.create(new)
        assert (await store.create(new)).existing
        await store.signal(new.key, b"x", name)
        assert [signal.signal_id for signal in (await store.load(new.key)).unread] == [name]
        assert await store.put("acme", name, name.encode(), 0) == 1
        claim = await claim_now(store)
        assert claim.key == new.key
        log = writer(store, new.key)
        await log.add(0, signals=(name,))
        assert (await store.load(new.key)).unread == ()
        await log.park(asks=[name], messages=(RunMessage(1, make.message("in"), name),))
        answers = make.answers(new.key, name, signal_id=f"a{name}", request_id=f"a{name}")
        assert not (await store.answer(answers)).existing
        assert (await store.answer(answers)).existing
        assert (await store.load(new.key)).messages[1].scope == name
    for name in HOSTILE:
        assert (await store.get_conversation("acme", f"c{name}")).active_run_id == name
        assert await store.get("acme", name) == (name.encode(), 1)


async def test_a_foreign_run_does_not_exist(store, make, writer):
    """Every method answers as for an id that was never used."""
    await store.create(make.new("r1", "c", tenant="acme"))
    foreign = RunKey("globex", "r1")
    calls = {
        "head": lambda: store.head(foreign),
        "load": lambda: store.load(foreign),
        "read": lambda: store.read(foreign, 0),
        "signal": lambda: store.signal(foreign, b"x", "s"),
        "wake": lambda: store.wake(foreign, 0),
        "follow": lambda: anext(store.follow(foreign, 0)),
        "conversation": lambda: store.get_conversation("globex", "c"),
        "messages": lambda: store.list_messages("globex", "c", page_size=0, page_token=""),
        "history": lambda: store.history("globex", "c", "r1"),
        "delete": lambda: store.delete_conversation("globex", "c"),
        "create": lambda: store.create(make.new("r2", "c", tenant="globex", new_conversation=False)),
    }
    for call in calls.values():
        with pytest.raises(EngineError) as refused:
            await asyncio.wait_for(call(), 100)
        assert refused.value.reason in {"UNKNOWN_RUN", "UNKNOWN_CONVERSATION"}
    with pytest.raises(Fenced):
        await store.append(foreign, make.frame(1), 0)
    await store.delete(foreign)
    assert (await store.list_runs("globex", states=(), conversation_id="", page_size=0, page_token="")).items == []
    assert (await store.head(make.key("r1"))).version == 0

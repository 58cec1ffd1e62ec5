"""The start of a NATS store: its address, the servers it refuses, the streams it makes and checks."""

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress

import pytest

from dualclaw_server.engine.store import Full, StoreError, Unavailable
from dualclaw_server.stores import store_from_url
from dualclaw_server.stores.nats import NatsStore, NotDurable, parse_address
from tests.nats_servers import NatsServers


@pytest.fixture
def url(nats_r1):
    """An address on one server, whose streams go with the test."""
    address = nats_r1.url()
    yield address
    nats_r1.remove(parse_address(address).name)


def test_an_address_has_servers_a_name_and_settings():
    """Several servers share the login of the first; what is not said has its default."""
    address = parse_address("nats://bob:secret@one,two:4333/RUNS?replicas=5&max_bytes=1000&lease=12&sync=always")
    assert address.servers == ("nats://bob:secret@one:4222", "nats://bob:secret@two:4333")
    assert (address.name, address.replicas, address.max_bytes, address.lease) == ("RUNS", 5, 1000, 12.0)
    assert address.shown == "one:4222, two:4333"
    plain = parse_address("tls://host")
    assert (plain.servers, plain.name, plain.replicas, plain.tls) == (("tls://host:4222",), "DUALCLAW", None, True)
    store = store_from_url("nats://host/X?lease=9", accept_loss=True, lease=5, max_stall=7)
    assert (store._lease, store._max_stall, store._accept_loss) == (9, 7, True)
    assert store_from_url("nats://host", lease=5)._lease == 5


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nats:host", "nats://"),
        ("nats://", "nats://"),
        ("nats://host:port", "HOST:PORT"),
        ("nats://a,,b", "HOST:PORT"),
        ("nats://host/a.b", "letters, digits"),
        ("nats://host/a/b", "letters, digits"),
        ("nats://host?replicas=2", "one of 1, 3, 5"),
        ("nats://host?max_bytes=-1", "whole number"),
        ("nats://host?lease=0", "seconds"),
        ("nats://host?lease=nan", "seconds"),
        ("nats://host?sync=lazy", "always"),
        ("nats://host?monitor=file:///etc/passwd", "http://HOST:8222"),
        ("nats://host?replicas=1&replicas=3", "twice"),
        ("nats://host?colour=red", "no setting colour"),
    ],
)
def test_an_address_that_is_none_is_refused_with_what_would_be_right(url, says):
    """The text names the fault, and never the password."""
    with pytest.raises(ValueError, match=says) as refused:
        parse_address(url.replace("//host", "//bob:secret@host"))
    assert "secret" not in str(refused.value)


async def test_one_replica_is_refused_unless_loss_is_accepted(url, nats_r1):
    """Acknowledged runs would be lost with that one machine."""
    with pytest.raises(NotDurable, match=r"1 of the 3 replicas.*DUALCLAW_ACCEPT_LOSS=1"):
        await NatsStore(parse_address(f"{url}&sync=always")).open()
    store = NatsStore(parse_address(url), accept_loss=True)
    await store.open()
    await store.close()


async def test_a_refused_start_makes_nothing(nats_r1):
    """A stream of one replica that it had made would still be there, and refused, once there are three servers."""
    address = parse_address(nats_r1.url(sync="always"))
    with pytest.raises(NotDurable):
        await NatsStore(address).open()
    client = await address.connect("test")
    reply = await client.request(f"$JS.API.STREAM.INFO.{address.name}", timeout=5)
    assert json.loads(reply.data)["error"]["err_code"] == 10059
    await client.close()


async def test_a_server_by_itself_will_do_where_loss_is_accepted(nats_r1):
    """Nobody has said how many replicas; a number that it cannot keep is refused at once, with what would be right."""
    name = parse_address(nats_r1.url()).name
    address = f"nats://{nats_r1.hosts}/{name}"
    with pytest.raises(NotDurable, match=r"stands alone.*DUALCLAW_ACCEPT_LOSS=1"):
        await NatsStore(parse_address(f"{address}?sync=always")).open()
    with pytest.raises(StoreError, match=r"stands alone.*3 replicas.*replicas=1"):
        await NatsStore(parse_address(f"{address}?replicas=3"), accept_loss=True).open()
    for _ in range(2):  # made, and found
        store = NatsStore(parse_address(address), accept_loss=True)
        await store.open()
        await store.close()
    nats_r1.remove(name)


async def test_a_server_that_is_away_is_named_with_what_happened(tmp_path):
    """An error that says nothing by itself is told by its name."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{closed.getsockname()[1]}?patience=1"
        with pytest.raises(Unavailable, match=r"answers: \w+"):
            await NatsStore(parse_address(url), accept_loss=True).open()


async def test_how_servers_sync_must_be_known(nats_r3, request):
    """By the operator's word, or by each server's own; unknown counts as lazy."""
    address = nats_r3.url()
    request.addfinalizer(lambda: nats_r3.remove(parse_address(address).name))
    with pytest.raises(NotDurable, match="unknown"):
        await NatsStore(parse_address(address)).open()
    monitors = "".join(f"&monitor=http://127.0.0.1:{port}" for port in nats_r3.monitors)
    for known in ("&sync=always", monitors):
        store = NatsStore(parse_address(address + known))
        await store.open()
        await store.close()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        silent = f"&monitor=http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(NotDurable, match="does not say"):
            await NatsStore(parse_address(address + silent)).open()


async def test_a_server_that_syncs_now_and_then_is_found_out(tmp_path):
    """The default of a server is two minutes."""
    servers = NatsServers(tmp_path, 1, sync="2m")
    try:
        url = servers.url(monitor=f"http://127.0.0.1:{servers.monitors[0]}")
        with pytest.raises(NotDurable, match="does not have sync_interval: always"):
            await NatsStore(parse_address(url)).open()
    finally:
        servers.stop()


async def test_a_user_with_the_documented_permissions_is_enough(tmp_path, make, writer, claim_now, collect):
    """docs/nats.md says what an engine may publish and subscribe to; here it may do nothing else."""
    users = """authorization { users: [
        { user: admin, password: "" }
        { user: engine, password: secret, permissions: {
            publish: ["RUNS.>", "RUNS_timer.>", "RUNS_note.>", "$JS.API.>", "$JS.ACK.>"]
            subscribe: ["RUNS_live.>", "RUNS_note.>", "_INBOX.>"]
        } }
    ] }"""
    servers = NatsServers(tmp_path, 1, users=users)
    try:
        for login, right in (("engine:wrong@", False), ("engine:secret@", True)):
            url = servers.url("RUNS", patience=100 if right else 1).replace("//", f"//{login}")
            store = NatsStore(parse_address(url), accept_loss=True)
            if not right:
                with pytest.raises(Unavailable):
                    await store.open()
                continue
            await store.open()
            await store.create(make.new("r1"))
            claim = await claim_now(store)
            log = writer(store, claim.key)
            following = asyncio.create_task(collect(store, claim.key, 0, 2))
            await log.add(text="z" * 300_000)
            await store.signal(claim.key, b"x", "s")
            await store.wake(claim.key, time.time() + 0.2)
            await log.park(asks=["i1"], signals=("s",))
            await following
            await claim.ack()
            assert (await claim_now(store)).key == claim.key
            await store.close()
    finally:
        servers.stop()


async def test_a_stream_that_would_forget_is_refused(url, nats_r1):
    """A stream with an age limit drops runs that wait for people; the text names what must change."""
    name = parse_address(url).name
    config = {"name": name, "subjects": [f"{name}.*.*.>"], "storage": "memory", "max_age": 3_600_000_000_000}
    assert "error" not in nats_r1.ask(f"STREAM.CREATE.{name}", config)
    with pytest.raises(StoreError, match=r"discard: new.*allow_atomic.*max_age 0.*storage: file"):
        await NatsStore(parse_address(url), accept_loss=True).open()


class OldServer:
    """Speaks as much of the protocol as a connection needs, and says it is an old server."""

    def __init__(self, version):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        info = {"server_id": "x", "version": version, "proto": 1, "headers": True, "max_payload": 1 << 20, "port": 1}
        self.hello = f"INFO {json.dumps(info)}\r\n".encode()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # whoever refuses it hangs up
                connection.sendall(self.hello)
                while data := connection.recv(4096):
                    if b"PING" in data:
                        connection.sendall(b"PONG\r\n")


async def test_a_server_that_is_too_old_is_refused_by_its_version():
    """Atomic batches came with 2.12; without them nothing here holds."""
    server = OldServer("2.11.9")
    try:
        with pytest.raises(StoreError, match=r"2\.11\.9.*2\.12"):
            await NatsStore(parse_address(f"nats://127.0.0.1:{server.port}"), accept_loss=True).open()
    finally:
        server.listener.close()


async def test_no_server_is_unavailable_and_names_it():
    """A wrong port is told within seconds."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"nats://bob:secret@127.0.0.1:{closed.getsockname()[1]}?patience=1"
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1") as refused:
            await NatsStore(parse_address(url)).open()
    assert "secret" not in str(refused.value)


async def test_a_stream_that_has_no_room_takes_nothing_and_goes_on_when_it_has(nats_r1, request, make, writer, until):
    """Full: typed, nothing stored, history untouched; deleting makes room."""
    address = parse_address(nats_r1.url(max_bytes=2_000_000))
    request.addfinalizer(lambda: nats_r1.remove(address.name))
    store = NatsStore(address, accept_loss=True)
    await store.open()
    try:
        for name in ("old", "r1"):
            await store.create(make.new(name))
        old, log = writer(store, make.key("old")), writer(store, make.key("r1"))
        await old.add(text="a" * 1_000_000)
        await log.add(text="b" * 200_000)
        before = await store.head(log.key)
        with pytest.raises(Full):
            await store.append(log.key, make.frame(2, text="c" * 900_000, checkpoint=b"d"), 1)
        assert await store.head(log.key) == before
        with pytest.raises(Full):
            await store.create(make.new("r2", record=b"e" * 250_000, request_id="q", title="f" * 900_000))
        await store.delete(old.key)
        await log.add(text="c" * 100_000)
        assert (await store.head(log.key)).version == 2
    finally:
        await store.close()

"""Who is let in: hosts and origins on loopback, CORS, bodies, and the caller's token."""

import asyncio
import contextlib

import pytest

from dualclaw.events import make_done
from dualclaw_clients.web.access import AccessPolicy, policy_for

DONE = make_done(message_id="m", conversation_id="c", content="")


async def test_loopback_names_are_served(web):
    """Any port will do, because a tunnel may map it."""
    for host in ("localhost:1", "127.0.0.1", "[::1]:8080", "LOCALHOST"):
        assert (await web.http.get("/v1/agents", headers={"Host": host})).status_code == 200, host


@pytest.mark.parametrize("path", ["/", "/v1/agents", "/healthz"])
async def test_a_foreign_host_on_loopback_is_refused(web, path):
    """A name that only resolves to this machine is DNS rebinding."""
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::2]", ""):
        answer = await web.http.get(path, headers={"Host": host})
        assert answer.status_code == 403, host
        assert answer.json()["error"]["reason"] == "PERMISSION_DENIED"


async def test_beyond_loopback_any_host_is_served(gateways):
    """A deployment has names of its own, which its proxy knows."""
    web = await gateways.start(policy=policy_for("0.0.0.0"))  # noqa: S104  # the policy of such a gateway, not a bind
    assert (await web.http.get("/v1/agents", headers={"Host": "chat.example"})).status_code == 200


async def test_the_hint_of_a_refusal_is_about_that_refusal(gateways):
    """A foreign host or origin, an unknown path, a wrong method and a large body each say what would be right."""
    web = await gateways.start(body_limit=2_000)
    cases = [
        (web.http.get("/v1/agents", headers={"Host": "chat.example"}), 403, "DUALCLAW_WEB_LISTEN"),
        (web.http.post("/v1/runs", headers={"Origin": "https://chat.example"}), 403, "DUALCLAW_WEB_ORIGINS"),
        (web.http.get("/v1/nothing"), 404, "/v1/runs"),
        (web.http.put("/v1/agents"), 405, "Use GET."),
        (web.http.post("/v1/runs", content=b" " * 2_001), 413, "DUALCLAW_WEB_MAX_BODY"),
    ]
    for call, status, hint in cases:
        answer = await call
        assert answer.status_code == status
        assert hint in answer.json()["error"]["hint"]
        assert "hint" not in answer.json()["error"]["metadata"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.evil.example", "chat.example"])  # noqa: S104  # no bind
def test_a_name_that_only_looks_like_loopback_has_not_its_policy(host):
    """What can be reached from elsewhere is warned of, so it must not pass for loopback."""
    assert not policy_for(host).hosts


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "[::1]", "localhost"])
def test_every_spelling_of_loopback_has_the_strict_policy(host):
    """Whatever way a gateway is told to listen on loopback, its hosts are checked."""
    assert policy_for(host).hosts


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example", "http://localhost:9"]
)
async def test_a_foreign_origin_changes_nothing(web, fake_engine, origin):
    """A page of another origin cannot start, cancel, answer or delete with its visitor's browser."""
    for method, path in (
        ("POST", "/messages/stream"),
        ("POST", "/v1/runs"),
        ("POST", "/v1/runs/r/cancel"),
        ("POST", "/v1/runs/r/resume"),
        ("DELETE", "/v1/conversations/c"),
    ):
        answer = await web.http.request(method, path, headers={"Origin": origin}, content=b'{"content": "x"}')
        assert answer.status_code == 403, path
        assert "access-control-allow-origin" not in answer.headers
    assert fake_engine.calls == []


async def test_the_gateways_own_origin_may_change_things(web, fake_engine):
    """The page served here has the origin of the Host it was loaded from."""
    fake_engine.on("Run", [DONE])
    headers = {"Origin": web.url}
    assert (await web.http.post("/v1/runs", headers=headers, json={})).status_code == 200


async def test_a_proxy_that_renames_the_host_does_not_lock_out_the_page(gateways, fake_engine):
    """The browser itself says that a request is of the same origin; no page can forge that header."""
    web = await gateways.start(policy=AccessPolicy())
    fake_engine.on("Run", [DONE])
    headers = {"Origin": "https://chat.example", "Host": "upstream:8080", "Sec-Fetch-Site": "same-origin"}
    assert (await web.http.post("/v1/runs", headers=headers, json={})).status_code == 200
    headers["Sec-Fetch-Site"] = "cross-site"
    assert (await web.http.post("/v1/runs", headers=headers, json={})).status_code == 403


async def test_cors_is_off_unless_an_origin_is_listed(web):
    """Without a list no foreign page can read an answer or pass a preflight."""
    preflight = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    answer = await web.http.options("/v1/runs", headers=preflight)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
    read = await web.http.get("/v1/agents", headers={"Origin": "https://chat.example"})
    assert "access-control-allow-origin" not in read.headers


async def test_a_listed_origin_passes_preflight_and_reads_streams(gateways, fake_engine):
    """Preflight, answers, streams and errors carry the origin; the run's id is readable."""
    web = await gateways.start(policy=policy_for("127.0.0.1", ["https://chat.example/"]))
    fake_engine.on("Run", [DONE])
    origin = {"Origin": "https://chat.example"}
    preflight = await web.http.options("/v1/runs", headers={**origin, "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "last-event-id" in preflight.headers["access-control-allow-headers"]
    stream = await web.http.post("/v1/runs", headers=origin, json={})
    assert "x-run-id" in stream.headers["access-control-expose-headers"]
    failure = await web.http.get("/v1/runs/none", headers=origin)
    for answer in (preflight, stream, failure):
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert answer.headers["vary"] == "origin"
        assert "access-control-allow-credentials" not in answer.headers
    other = await web.http.options("/v1/runs", headers={**preflight.request.headers, "origin": "https://x.example"})
    assert other.status_code == 405


async def test_the_callers_token_is_forwarded_unchanged(web, fake_engine):
    """Every rpc a request causes carries the caller's own key."""
    fake_engine.on("Run", [DONE])
    headers = {"Authorization": "bearer k-1.2_3"}
    await web.http.post("/messages/stream", headers=headers, json={"content": "x"})
    await web.http.post("/v1/runs", headers=headers, json={})
    for path in ("/v1/runs", "/v1/runs/r", "/v1/runs/r/events", "/v1/conversations", "/v1/agents"):
        await web.http.get(path, headers=headers)
    await web.http.get("/v1/conversations/c/messages", headers=headers)
    await web.http.delete("/v1/conversations/c", headers=headers)
    await web.http.post("/v1/runs/r/cancel", headers=headers)
    assert len(fake_engine.calls) == 10
    assert {call.metadata.get("authorization") for call in fake_engine.calls} == {"Bearer k-1.2_3"}


async def test_a_caller_without_a_token_never_gets_the_gateways_own(gateways, fake_engine):
    """A gateway that holds a key must not lend it to whoever asks."""
    web = await gateways.start(token="the-gateways-own")
    fake_engine.on("Run", [DONE])
    await web.http.post("/messages/stream", json={"content": "x"})
    await web.http.post("/v1/runs", json={})
    for path in (
        "/v1/runs",
        "/v1/runs/r",
        "/v1/runs/r/events",
        "/v1/conversations",
        "/v1/conversations/c",
        "/v1/agents",
    ):
        await web.http.get(path)
    assert len(fake_engine.calls) == 8
    assert all("authorization" not in call.metadata for call in fake_engine.calls)


@pytest.mark.parametrize("value", ["Basic abc", "Bearer", "Bearer k\u00e9y"])
async def test_another_scheme_or_no_token_in_it_is_401(web, fake_engine, value):
    """A credential the engine cannot judge is refused here, and never silently dropped."""
    headers = {"Authorization": value.encode("latin-1")}
    answer = await web.http.post("/v1/runs", headers=headers, json={})
    assert answer.status_code == 401
    assert answer.json()["error"]["reason"] == "UNAUTHENTICATED"
    original = await web.http.post("/messages/stream", headers=headers, json={"content": "x"})
    assert '"code": "unauthenticated"' in original.text
    assert fake_engine.calls == []


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_above_the_limit_is_413(gateways, fake_engine, chunked):
    """The limit holds for declared and for chunked bodies, on every route that takes one."""
    web = await gateways.start(body_limit=2_000)

    async def chunks():
        for _ in range(30):
            yield b" " * 100

    for path in ("/messages/stream", "/v1/runs", "/v1/runs/r/resume", "/v1/runs/r/cancel"):
        answer = await web.http.post(path, content=chunks() if chunked else b" " * 3_000)
        assert answer.status_code == 413, path
        assert "2000 bytes" in answer.json()["error"]["message"]
    assert fake_engine.calls == []


async def test_a_body_of_exactly_the_limit_is_read(gateways, fake_engine):
    """The limit itself is allowed."""
    web = await gateways.start(body_limit=2_000)
    fake_engine.on("Run", [DONE])
    answer = await web.http.post("/v1/runs", content=b"{}" + b" " * 1_998)
    assert answer.status_code == 200


async def test_a_declared_body_above_the_limit_is_refused_before_it_is_sent(web):
    """Nobody has to send, and nothing has to hold, what will be refused anyway."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(web.url.rpartition(":")[2]))
    try:
        writer.write(b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 60)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_malformed_origin_is_refused_like_a_foreign_one(web):
    """Whatever stands there, it is not the gateway's own; and an answer comes, not a broken request."""
    for origin in ("http://[", "null", "", "//", "https://[::1", "localhost"):
        answer = await web.http.post("/v1/runs", headers={"Origin": origin}, content=b"{}")
        assert answer.status_code == 403, origin
        assert answer.json()["error"]["reason"] == "PERMISSION_DENIED"


async def test_an_origin_without_a_host_is_not_the_own_one_of_a_request_without_a_host(gateways):
    """Beyond loopback any host is served, none included; a sandboxed page ("null") is foreign all the same."""
    web = await gateways.start(policy=policy_for("0.0.0.0"))  # noqa: S104  # the policy of such a gateway, not a bind
    answer = await web.http.post("/v1/runs", headers={"Host": "", "Origin": "null"}, content=b"{}")
    assert answer.status_code == 403


@pytest.mark.parametrize("name", ["Host", "Origin", "Authorization"])
async def test_a_header_that_decides_who_may_call_must_not_come_twice(web, name):
    """A proxy may have checked one of them and the gateway the other."""
    values = {"Host": "localhost", "Origin": web.url, "Authorization": "Bearer key"}
    lines = [f"{each}: {value}" for each, value in values.items()] + [f"{name}: {values[name]}"]
    reader, writer = await asyncio.open_connection("127.0.0.1", int(web.url.rpartition(":")[2]))
    writer.write("\r\n".join(["GET /v1/agents HTTP/1.1", *lines, "Connection: close", "", ""]).encode())
    answer = (await asyncio.wait_for(reader.read(), 60)).decode()
    writer.close()
    assert answer.startswith("HTTP/1.1 400 ")
    assert f"{name.lower()} is given twice" in answer


async def test_a_head_without_end_is_refused(web):
    """However it is made, nobody fills the gateway's memory with what no endpoint will ever see."""
    for start in (b"GET /healthz HTTP/1.1\r\nX: ", b"GET /healthz HTTP/1.1\r\n", b"GET /"):
        _, writer = await asyncio.open_connection("127.0.0.1", int(web.url.rpartition(":")[2]))
        filler = b"a: b\r\n" if start.endswith(b"\r\n") else b"a" * 6
        sent = 0
        try:
            writer.write(start)
            async with asyncio.timeout(60):
                while sent < 4 * 1024 * 1024:
                    writer.write(filler * 1_000)
                    sent += 6_000
                    await writer.drain()
                    await asyncio.sleep(0)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
        assert sent < 4 * 1024 * 1024, start


async def test_a_connection_that_asks_nothing_is_closed_and_one_that_waits_for_its_answer_is_not(gateways, fake_engine):
    """Silence and half a head use up a connection each; an open stream may last as long as its run."""
    web = await gateways.start(head_timeout=3)
    fake_engine.on("Run", [asyncio.Event(), DONE])
    address = ("127.0.0.1", int(web.url.rpartition(":")[2]))
    body = b'{"message": {"role": "ROLE_USER", "parts": [{"text": "hi"}]}}'
    request = b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    readers = []
    writers = []
    for head in (b"", b"GET / HTTP/1.1\r\nHost: l", request):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head)
        readers.append(reader)
        writers.append(writer)
    try:
        async with asyncio.timeout(60):
            assert await readers[2].readuntil(b": ok\n\n")
            for reader in readers[:2]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert len(web.app.streams) == 1
    finally:
        for writer in writers:
            writer.transport.abort()

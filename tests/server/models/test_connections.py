"""The way to an endpoint: no host, no TLS, no handshake; proxies and certificates of the environment."""

import asyncio
import json
import re
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from dualclaw_server.models import ModelTimeouts
from dualclaw_server.models.vendors import shipped_vendors
from tests.toolchains import require

KEY = "sk-test-0123456789abcdef"
PATIENCE = 60.0
WHOLE = {"choices": [{"message": {"content": "part"}, "finish_reason": "stop"}]}


async def test_nobody_listens(kit) -> None:
    """A refused connection is MODEL_UNAVAILABLE, retryable; the text is address and reason, nothing of the client's."""
    with kit.port_of_nobody() as nobody:
        port = nobody.getsockname()[1]
        async with kit.model_at(kit.Vendor(f"http://127.0.0.1:{port}/v1"), KEY) as model:
            outcome = await kit.play(model)
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_UNAVAILABLE", True)
    assert outcome.error.message == f"The model's endpoint cannot be reached: 127.0.0.1:{port}: Connection refused"


async def test_a_host_that_does_not_exist_is_named(kit) -> None:
    """A wrong name is told with what the resolver says."""
    async with kit.model_at(kit.Vendor("http://no-such-host.invalid:81/v1"), KEY) as model:
        outcome = await kit.play(model)
    assert outcome.error.reason == "MODEL_UNAVAILABLE"
    assert re.search(
        r"reached: no-such-host\.invalid:81: [^\[\]]*(?:[Nn]ame|resolution)[^\[\]]*$", outcome.error.message
    )


async def test_an_endpoint_without_tls_asked_for_tls_says_so(kit) -> None:
    """The library's own reason is told, not the system error that shares its number."""

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with kit.model_at(kit.Vendor(f"https://127.0.0.1:{port}/v1"), KEY) as model:
            outcome = await kit.play(model)
    assert outcome.error.reason == "MODEL_UNAVAILABLE"
    assert "SSL" in outcome.error.message
    assert "ssl:" not in outcome.error.message
    assert "permitted" not in outcome.error.message


@asynccontextmanager
async def tcp(
    kit, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[int]:
    """Serve plain TCP and yield the port."""
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(held(reader, writer))
        tasks.add(task)
        task.add_done_callback(partial(over, writer))

    def over(writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        writer.close()  # also that of a task which was cancelled before it began

    async def held(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            await serve(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await kit.accepting_is_over()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE)
        await server.wait_closed()


@pytest.mark.parametrize("name", ["custom", "openai-responses", "anthropic"])
async def test_a_connection_that_never_stands_is_a_timeout(kit, name: str) -> None:
    """A server that takes the connection and never ends the TLS handshake: the wait for the connection ends it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass

    async with tcp(kit, serve) as port:
        timeouts = ModelTimeouts(connect=0.3, first_token=PATIENCE)
        model = shipped_vendors()[name].make_model("m", base_url=f"https://127.0.0.1:{port}/v1", timeouts=timeouts)
        outcome = await kit.play(model, within=PATIENCE / 2)
        await model.aclose()
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_TIMEOUT", True)
    assert "No connection" in outcome.error.message


PROGRAM = """
import asyncio, os
from dualclaw import ContentPart, Message, Role
from dualclaw_server.engine.model import ModelError, ModelRequest
from dualclaw_server.models import model_from_spec

async def main():
    request = ModelRequest([Message(role=Role.ROLE_USER, parts=[ContentPart(text="hi")])])
    model = model_from_spec(os.environ["SPEC"])
    try:
        print((await model.generate(request)).message.parts[0].text)
    except ModelError as error:
        print(error.reason, error.message)
    await model.aclose()

asyncio.run(main())
"""


async def said_elsewhere(spec: str, **environment: str) -> str:
    """Make one call in a process with this environment alone; return what it printed."""
    path = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, env={"SPEC": spec} | path | environment, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE):
        out, _ = await process.communicate()
    return out.decode().strip()


async def own_certificate(folder: Path) -> ssl.SSLContext:
    """Make cert.pem and key.pem for 127.0.0.1 in the folder; return what serves with them."""
    require("openssl")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    made = await asyncio.create_subprocess_exec(
        *command, "-keyout", "key.pem", "-out", "cert.pem", cwd=folder, stderr=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(PATIENCE):
        assert await made.wait() == 0
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return tls


async def test_proxy_and_ca_of_the_environment_are_used(kit, vendor, tmp_path) -> None:
    """HTTP_PROXY decides where a connection goes; SSL_CERT_FILE makes a private certificate trusted.

    Without the variable the same certificate is refused, as MODEL_UNAVAILABLE.
    """
    tls = await own_certificate(tmp_path)
    body = json.dumps(WHOLE).encode()
    async with vendor(kit.answers(200, body)) as proxy, kit.vendor_of(kit.answers(200, body), tls=tls) as secure:
        environment = {"HTTP_PROXY": proxy.url.removesuffix("/v1"), "SSL_CERT_FILE": str(tmp_path / "cert.pem")}
        assert await said_elsewhere("custom:m@http://vendor.invalid/v1", **environment) == "part"
        assert proxy.asked[0].line == "POST http://vendor.invalid/v1/chat/completions HTTP/1.1"
        assert await said_elsewhere(f"custom:m@{secure.url}", **environment) == "part"
        async with kit.model_at(secure) as model:
            outcome = await kit.play(model)
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_UNAVAILABLE", True)


async def test_no_proxy_goes_past_the_proxy(kit, vendor) -> None:
    """A host that NO_PROXY names is reached directly; any other goes by HTTP_PROXY."""
    proxied: list[str] = []

    async def proxy(connection, asked) -> None:
        proxied.append(asked.line)
        await kit.answers(503, b'{"error":{"message":"from the proxy"}}')(connection, asked)

    async with vendor(kit.answers(200, json.dumps(WHOLE).encode())) as served, vendor(proxy) as gate:
        environment = {"HTTP_PROXY": gate.url.removesuffix("/v1")}
        spec = f"custom:m@{served.url}"
        direct = await said_elsewhere(spec, **environment, NO_PROXY="127.0.0.1")
        assert (direct, proxied) == ("part", [])
        through = await said_elsewhere(spec, **environment)
    assert through.startswith("MODEL_UNAVAILABLE")
    assert "from the proxy" in through
    assert len(proxied) == 1


async def test_https_goes_through_the_proxys_tunnel_and_trusts_the_ca_of_the_environment(kit, tmp_path) -> None:
    """HTTPS_PROXY is asked to CONNECT; what comes out of it is checked against SSL_CERT_FILE."""
    tls = await own_certificate(tmp_path)
    asked: list[str] = []

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head.split("\r\n", 1)[0])
        host, _, port = head.split()[1].rpartition(":")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(pipe(reader, there_writer), pipe(there_reader, writer))

    async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65_536):
                sink.write(data)
                await sink.drain()
        sink.close()

    body = json.dumps(WHOLE).encode()
    async with kit.vendor_of(kit.answers(200, body), tls=tls) as secure, tcp(kit, tunnel) as port:
        proxy = f"http://127.0.0.1:{port}"
        spec = f"custom:m@{secure.url}"
        trusted = await said_elsewhere(spec, HTTPS_PROXY=proxy, SSL_CERT_FILE=str(tmp_path / "cert.pem"))
        refused = await said_elsewhere(spec, HTTPS_PROXY=proxy)
    assert trusted == "part"
    assert asked[0].startswith(f"CONNECT {secure.url.removeprefix('https://').removesuffix('/v1')} ")
    assert refused.startswith("MODEL_UNAVAILABLE")

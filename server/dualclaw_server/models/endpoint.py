"""An HTTP endpoint of a model vendor: one POST, its answer read as it arrives, every wait bounded.

Rules and their reasons:

- httpx is what people configure (``HTTP_PROXY``, ``NO_PROXY``, ``SSL_CERT_FILE``, a transport of their own): which
  way leads to the URL is asked of it once. Where that is the network, aiohttp is spoken to directly, with URL,
  headers and timeouts made once: httpx would make all of them anew for every request, and read a chunk at a time.
- aiohttp's errors are told as httpx's, which reports a connection lost as a connect timeout; so timeouts are told
  apart by their cause, not by the class of httpx.
- Four waits, each bounded on its own (``ModelTimeouts``). Keepalives are no tokens: they do not stretch the
  wait for the first one, and later keep a call open only so long.
- Closing closes the connection at once, unless the answer was read to its end: then it is used again. After
  the stream's own end mark a moment is left for the end of the HTTP message, which usually follows at once;
  without it every call would pay for a new connection.
- Nothing here puts a header, a query or the user part of an address into an error. A user in the address is sent
  as HTTP means it, in an Authorization header; where the key needs that header, only one of the two can be meant.
"""

import asyncio
import base64
import errno
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport, HttpxAiohttpClient
from httpx_aiohttp.transport import map_aiohttp_exceptions

from dualclaw_server.engine.deadline import Deadline
from dualclaw_server.engine.model import ModelError
from dualclaw_server.models.failures import Redactor, error_from_status
from dualclaw_server.models.network import Given, Network, Response

logger = logging.getLogger(__name__)

_ERROR_BODY_BYTES = 64 * 1024
_DRAIN_SECONDS = 0.02
_KEEPALIVE_SECONDS = 4.0  # servers commonly drop idle connections after 5 s; a POST on a dead one cannot be repeated
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_FRAMING = frozenset({"content-length", "transfer-encoding", "expect"})
_REQUEST_ID_HEADERS = ("x-request-id", "request-id", "x-amzn-requestid", "apim-request-id", "x-trace-id")


@dataclass(frozen=True, slots=True)
class ModelTimeouts:
    """How long a model call may wait for what, in seconds."""

    connect: float = 10.0
    """Until the connection stands, name lookup and TLS included."""
    first_token: float = 60.0
    """From the start of the call until text, reasoning or a tool call; keepalives do not count."""
    idle: float = 60.0
    """Without a byte, once the first token is there."""
    stalled: float = 300.0
    """Without anything but keepalives, once the first token is there."""
    after_finish: float = 5.0
    """For the usage and the end mark, once the finish reason is there; then the answer counts as it is."""
    whole: float = 600.0
    """For the whole of an answer that is not streamed."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds")


def bearer(api_key: str) -> Mapping[str, str]:
    """Return the header of a bearer token; none without a key."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


class Endpoint:
    """One URL of one vendor, with its key and its connections. Safe for any number of calls at once.

    Args:
        base_url: address up to where the API's paths begin; a query in it is kept, a user is sent by HTTP Basic.
        path: what is appended, unless the base URL already ends with it.
        api_key: the key; white space around it is not part of it. Empty: none is sent.
        timeouts: bounds of the waits.
        auth: makes the headers that carry the key, and others the API demands.
        headers: sent in addition; they may replace any of these.
        tls: settings of TLS, to be shared by endpoints; None: those of the environment.
        transport: answers the requests instead of the network; None: the network, by the environment's proxies.

    Raises:
        ValueError: the address or a header cannot be used; the text does not repeat it.
    """

    def __init__(
        self,
        base_url: str,
        path: str,
        api_key: str,
        *,
        timeouts: ModelTimeouts,
        auth: Callable[[str], Mapping[str, str]] = bearer,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.timeouts = timeouts
        self._url, user, password = _join(base_url, path)
        sent = {
            "accept-encoding": "identity",
            "content-type": "application/json",
            "user-agent": "dualclaw",
        }
        key = _header_value("the API key", api_key.strip())
        sent.update((name.lower(), value) for name, value in auth(key).items())
        for name, value in (headers or {}).items():
            sent[_header_name(name)] = _header_value(f"header {name}", value)
        own = [*(headers or {}).values(), *_long_values(self._url)]
        if user or password:
            if "authorization" in sent:
                raise ValueError(
                    "the base URL has a user, and the key or a header is sent as Authorization too: leave out one"
                )
            basic = base64.b64encode(f"{user}:{password}".encode()).decode()
            sent["authorization"] = f"Basic {basic}"
            own += [basic, password or user]
        self.redact = Redactor([key, *own])
        self._client = HttpxAiohttpClient(
            headers=sent,
            timeout=httpx.Timeout(None, connect=timeouts.connect, pool=timeouts.connect),
            limits=httpx.Limits(max_connections=0, keepalive_expiry=_KEEPALIVE_SECONDS),
            follow_redirects=False,
            verify=True if tls is None else tls,
            transport=transport,
            trust_env=transport is None,
        )
        way = self._client._transport_for_url(self._url)
        self._network = Network(way, self._url, sent, timeouts.connect) if isinstance(way, AiohttpTransport) else None

    @property
    def path(self) -> str:
        """Path of the URL, for hints."""
        return self._url.path

    async def post(self, body: bytes, *, accept: str, within: float) -> "Answer":
        """Send a request and return its answer once the headers are there; close it afterwards.

        Args:
            body: the JSON.
            accept: media type wanted.
            within: seconds until the headers must be there.

        Raises:
            ModelError: no connection, no answer in time, or a status that is not 2xx.
        """
        deadline = Deadline()
        due = deadline.now() + within
        answer: Answer | None = None
        try:
            try:
                response = await deadline.wait(self._send(body, accept), due)
            except TimeoutError:
                raise _timed_out(f"The model's endpoint did not answer within {within:g} s.") from None
            except Exception as error:
                raise self._not_reached(error) from None
            answer = Answer(response, deadline)
            if not 200 <= answer.status < 300:
                raise await self._refused(answer, due)
        except BaseException:
            deadline.close()
            if answer is not None:
                await answer.aclose()
            raise
        return answer

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _send(self, body: bytes, accept: str) -> Response:
        if self._network is not None:
            with map_aiohttp_exceptions():
                return await self._network.post(body, accept)
        request = self._client.build_request("POST", self._url, content=body, headers={"accept": accept})
        return Given(await self._client.send(request, stream=True))

    def _not_reached(self, error: Exception) -> ModelError:
        """Map a failure before the headers. What is no failure of the network is a defect and stays one."""
        if not isinstance(error, httpx.HTTPError) and not type(error).__module__.startswith("aiohttp"):
            raise error
        if isinstance(error.__cause__ or error, TimeoutError):
            return _timed_out(f"No connection to the model's endpoint within {self.timeouts.connect:g} s.")
        if isinstance(error, httpx.UnsupportedProtocol):
            return ModelError("MODEL_BAD_RESPONSE", "The base URL is no http address.", retryable=False)
        detail = self.redact.excerpt(_reason(error))
        if not isinstance(error, httpx.HTTPError):
            return ModelError(
                "MODEL_BAD_RESPONSE",
                f"The model's endpoint does not speak HTTP: {detail}",
                retryable=False,
                detail=detail,
            )
        return ModelError(
            "MODEL_UNAVAILABLE",
            f"The model's endpoint cannot be reached: {detail or 'the connection was lost before an answer'}",
            retryable=True,
            detail=detail,
            hint="Check DUALCLAW_MODEL_BASE_URL, and that the endpoint is up.",
        )

    async def _refused(self, answer: "Answer", due: float) -> ModelError:
        with suppress(ModelError):
            await answer.read_all(_ERROR_BODY_BYTES, due)
        text = answer.text()
        return error_from_status(
            answer.status, parse_json(text), text, answer.headers, self.redact, path=self._url.path
        )


class Answer:
    """An HTTP answer that is being read. Close it; that closes the connection unless it was read to the end."""

    def __init__(self, response: Response, deadline: Deadline) -> None:
        self._response = response
        self._deadline = deadline
        self._ended = False
        self._body: list[bytes] = []
        self.status = response.status
        """HTTP status."""
        self.headers: Mapping[str, str] = response.headers
        """The headers, by any spelling of their name."""

    @property
    def media_type(self) -> str:
        """Content type in lower case, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def request_id(self) -> str:
        """The vendor's id of the call, or empty."""
        found = (self.headers.get(name, "") for name in _REQUEST_ID_HEADERS)
        return next(filter(None, found), "")

    def now(self) -> float:
        """Return the clock that ``due`` refers to."""
        return self._deadline.now()

    async def read(self, due: float) -> bytes | None:
        """Return all bytes that are there, waiting for at least one; None at the end.

        Raises:
            TimeoutError: nothing came until ``due``.
            ModelError: MODEL_STREAM_BROKEN, the connection was lost.
        """
        try:
            data = await self._deadline.wait(self._response.read(), due)
        except TimeoutError:
            raise
        except Exception as error:
            if not isinstance(error, httpx.HTTPError) and not type(error).__module__.startswith("aiohttp"):
                raise
            raise ModelError(
                "MODEL_STREAM_BROKEN", "The connection was lost in the middle of the model's answer.", retryable=True
            ) from None
        if not data:
            self._ended = True
            return None
        return data

    async def read_all(self, limit: int, due: float) -> None:
        """Read the body for ``text``, up to the limit in bytes.

        Raises:
            ModelError: MODEL_TIMEOUT or MODEL_STREAM_BROKEN; what arrived is kept.
        """
        size = sum(map(len, self._body))
        try:
            while size < limit and (chunk := await self.read(due)) is not None:
                self._body.append(chunk)
                size += len(chunk)
        except TimeoutError:
            raise _timed_out("The model's answer did not arrive in time.") from None

    def body(self) -> bytes:
        """Return what ``read_all`` has read."""
        return b"".join(self._body)

    def text(self) -> str:
        """Return what ``read_all`` has read, as text."""
        return self.body().decode("utf-8", "replace")

    async def drain(self) -> None:
        """Give the end of the HTTP message a moment to arrive, so that the connection can be used again."""
        self._ended = self._ended or self._response.over()
        if self._ended:
            return
        due = self._deadline.now() + _DRAIN_SECONDS
        with suppress(TimeoutError, ModelError):
            while await self.read(due) is not None:
                pass

    async def aclose(self) -> None:
        """Close. A failure of the connection while it closes no longer matters to anyone."""
        self._deadline.close()
        try:
            if self._ended:
                await self._response.close()
                return
            async with asyncio.timeout(1):
                await self._response.close()
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            logger.debug("closing a model's answer failed: %s", type(error).__name__)


def parse_json(text: str) -> object:
    """Return the JSON value of a text, or None."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None


def _reason(error: Exception) -> str:
    """Return why there is no connection: address and the system's words, without the transport's own notation."""
    cause = error.__cause__ or error
    if isinstance(cause, aiohttp.ClientConnectorCertificateError):
        return f"{cause.host}:{cause.port}: {cause.certificate_error}"
    if not isinstance(cause, aiohttp.ClientConnectorError):
        return str(error)
    failure = cause.os_error
    plain = not isinstance(failure, ssl.SSLError | socket.gaierror)  # these two count errors in their own ways
    known = plain and failure.errno in errno.errorcode
    text = os.strerror(failure.errno or 0) if known else failure.strerror or str(failure)
    return f"{cause.host}:{cause.port}: {text}"


def _timed_out(message: str) -> ModelError:
    return ModelError("MODEL_TIMEOUT", message, retryable=True)


def _join(base_url: str, path: str) -> tuple[httpx.URL, str, str]:
    """Return the whole URL without its user, then the user's name and password."""
    try:
        url = httpx.URL(base_url.strip())
        host = url.host
        host.encode("idna")  # as the transport will, where a failure would be a surprise
    except (httpx.InvalidURL, ValueError, TypeError):
        raise ValueError("the base URL is no URL, or its host is no name that can exist") from None
    if url.scheme not in ("http", "https") or not host:
        raise ValueError("the base URL must start with http:// or https:// and name a host")
    if "%" in host.partition("%25")[0]:
        raise ValueError("the host of the base URL has characters that no host can have")
    if url.port is not None and not 0 < url.port < 65_536:
        raise ValueError("the port of the base URL must be from 1 to 65535")
    base = url.path.rstrip("/")
    whole = url.copy_with(username="", password="", path=base if base.endswith(path) else base + path, fragment=None)
    return whole, url.username, url.password


def _header_name(name: str) -> str:
    if _TOKEN.fullmatch(name) is None:
        raise ValueError("a header has a name that no header can have: letters, digits and dashes may be in it")
    if name.lower() in _FRAMING:
        raise ValueError(f"header {name} belongs to the connection and cannot be set")
    return name.lower()


def _header_value(what: str, value: str) -> str:
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"{what} has characters that no HTTP header can carry")
    return value


def _long_values(url: httpx.URL) -> list[str]:
    """Return the query's values that may be keys: some vendors take theirs there."""
    return [value for name, value in url.params.multi_items() if name != "api-version" and len(value) >= 8]

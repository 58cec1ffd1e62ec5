"""Settings of an endpoint: addresses, users, keys, headers, waits; a transport in place of the network."""

import base64
import json
import traceback

import httpx
import pytest

from dualclaw_server.models.chat.api import ChatApi
from dualclaw_server.models.chat.model import OpenAIChatModel
from dualclaw_server.models.endpoint import Endpoint, ModelTimeouts
from dualclaw_server.models.http_model import HttpChatModel
from dualclaw_server.models.vendors import shipped_vendors

KEY = "sk-test-0123456789abcdef"


WRONG = {
    "no scheme": ("m", "127.0.0.1/v1", KEY),
    "another scheme": ("m", "ftp://127.0.0.1/v1", KEY),
    "no host": ("m", "http:///v1", KEY),
    "a host that cannot be": ("m", f"http://a..b/{KEY}/v1", ""),
    "a host too long": ("m", f"http://{'a' * 300}/v1", ""),
    "a host with a blank": ("m", "http://exa mple/v1", KEY),
    "half an address": ("m", f"http://[::1/{KEY}", ""),
    "port 0": ("m", "http://127.0.0.1:0/v1", KEY),
    "a port too large": ("m", "http://127.0.0.1:70000/v1", KEY),
    "a user beside a bearer key": ("m", f"http://bob:{KEY}@127.0.0.1/v1", "other-key"),
    "no name": ("", "http://127.0.0.1/v1", KEY),
    "a key over two lines": ("m", "http://127.0.0.1/v1", "sk-first\nsk-second"),
    "a key beyond ASCII": ("m", "http://127.0.0.1/v1", "sk-钥匙"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_refused_without_repeating_them(case: str) -> None:
    """A setting that cannot work is a ValueError at once, and its text holds no key."""
    name, url, key = WRONG[case]
    with pytest.raises(ValueError, match=r"URL|name|API key|user") as refused:
        OpenAIChatModel(name, url, key)
    assert "sk-" not in str(refused.value)


@pytest.mark.parametrize("bad", [0, -1, float("nan")])
def test_a_wait_of_no_time_is_refused(bad: float) -> None:
    """Every wait must be more than nothing."""
    with pytest.raises(ValueError, match="idle"):
        ModelTimeouts(idle=bad)


HEADERS = {
    "a blank in the name": {f"x {KEY}": "a"},
    "no name": {"": "a"},
    "a line break in the name": {"x\n": "a"},
    "a name beyond ASCII": {"ü": "a"},
    "a line break in the value": {"x-team": f"{KEY}\nx-other: b"},
    "the length of the message": {"Content-Length": "3"},
    "how the message is framed": {"transfer-encoding": "chunked"},
    "a wait for permission": {"Expect": "100-continue"},
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_cannot_be_sent_are_refused_at_once(case: str) -> None:
    """Not at the first call; and neither name nor value is repeated where it may be a key."""
    with pytest.raises(ValueError, match="header") as refused:
        OpenAIChatModel("m", "http://127.0.0.1/v1", headers=HEADERS[case])
    assert KEY not in str(refused.value)


USERS = {
    "name and password": (f"bob:{KEY}", f"bob:{KEY}", KEY),
    "a name alone, which is the key": (KEY, f"{KEY}:", KEY),
    "escaped": ("b%40b:p%2Fw%20x", "b@b:p/w x", "p/w x"),
}


@pytest.mark.parametrize("case", USERS)
async def test_a_user_in_the_address_is_sent_by_http_basic_and_never_told(kit, vendor, case: str) -> None:
    """The vendor gets the header, the URL has no user any more, and a vendor that repeats it is not repeated."""
    written, meant, secret = USERS[case]
    basic = base64.b64encode(meant.encode()).decode()
    body = json.dumps({"error": {"message": f"no {secret}, got {basic}"}}).encode()
    async with vendor(kit.answers(401, body)) as served:
        model = OpenAIChatModel("m", served.url.replace("://", f"://{written}@"))
        outcome = await kit.play(model)
        await model.aclose()
    assert served.asked[0].headers["authorization"] == f"Basic {basic}"
    assert "@" not in served.asked[0].line
    assert outcome.error.reason == "MODEL_AUTH"
    told = repr(vars(outcome.error)) + "".join(traceback.format_exception(outcome.error))
    assert secret not in told
    assert basic not in told


async def test_a_user_goes_together_with_a_key_in_a_header_of_its_own(kit, vendor) -> None:
    """A proxy that wants HTTP Basic may stand before a vendor that wants x-api-key."""
    async with vendor(kit.answers(503, b"{}")) as served:
        address = served.url.replace("://", "://bob:pass-word@")
        model = shipped_vendors()["anthropic"].make_model("m", base_url=address, key=KEY)
        await kit.play(model)
        await model.aclose()
    headers = served.asked[0].headers
    assert (headers["x-api-key"], headers["authorization"].startswith("Basic ")) == (KEY, True)


class Canned(httpx.AsyncBaseTransport):
    """Answers every request with one completion."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        text = f"{request.method} {request.url.path}"
        return httpx.Response(200, json={"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


async def test_a_transport_answers_in_place_of_the_network(kit) -> None:
    """Everything but the network is the same: path, headers, reading."""
    api = ChatApi()
    endpoint = Endpoint("http://vendor.invalid/v1", api.path, "", timeouts=ModelTimeouts(), transport=Canned())
    model = HttpChatModel("m", endpoint, api)
    outcome = await kit.play(model)
    await model.aclose()
    assert outcome.text == "POST /v1/chat/completions"

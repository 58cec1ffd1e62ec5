"""The table of vendors, what a setting makes of it, and what goes over the wire to whom."""

import json
from dataclasses import fields
from urllib.parse import urlsplit

import pytest

from dualclaw_server.app import make_parts
from dualclaw_server.engine.model import ChatModel, ModelError, ModelRequest, Restart, ToolSpec
from dualclaw_server.models import ModelTimeouts, RouterModel, ScriptedModel, model_from_spec
from dualclaw_server.models.vendors import Vendor, find_vendor, read_vendors, shipped_vendors
from dualclaw_server.settings import Settings, read_settings

NAMED = ["openai", "azure", "anthropic", "deepseek", "qwen", "dashscope", "glm", "kimi", "mistral", "groq", "xai"]
NAMED += ["gemini", "openrouter", "ollama", "vllm", "llamacpp", "custom"]
LOCAL = {"ollama", "vllm", "llamacpp"}
KEY = "sk-general-0123456789"
OWN_KEY = "sk-vendor-0123456789"
ROW: dict[str, object] = {"title": "T", "api": "chat", "base_url": "https://t.example/v1", "keys": ["T_API_KEY"]}


def vendors() -> list[Vendor]:
    """Every vendor that ships, once."""
    return list({vendor.name: vendor for vendor in shipped_vendors().values()}.values())


def test_every_vendor_people_ask_for_is_there() -> None:
    """The names of the design are names or aliases of the table."""
    assert set(NAMED) <= set(shipped_vendors())


@pytest.mark.parametrize("vendor", vendors(), ids=lambda vendor: vendor.name)
def test_each_vendor_of_the_table_makes_models(vendor: Vendor) -> None:
    """It has an address that is https or on this machine, and the default and every row of models is usable."""
    assert vendor.base_url.startswith("http://127.0.0.1:" if vendor.name in LOCAL else "https://") or (
        vendor.name in {"azure", "azure-responses", "custom"} and vendor.base_url == ""
    )
    assert vendor.key_needed is (vendor.name not in LOCAL | {"custom"})
    for row in vendor.models:
        assert vendor.api_of(row.match[0].replace("*", "x")).path.startswith("/")
    assert vendor.traits_of("a-model-nobody-knows").continues is False


@pytest.mark.parametrize("vendor", vendors(), ids=lambda vendor: vendor.name)
def test_no_row_of_models_is_hidden_by_one_before_it(vendor: Vendor) -> None:
    """The first row that fits counts, so each pattern's plainest name must reach its own row."""
    for row in vendor.models:
        for pattern in row.match:
            assert vendor._row(pattern.replace("*", "")) is row, pattern


KNOWN = {
    ("openai", "gpt-4o-mini"): (128_000, True, False),
    ("openai", "gpt-4"): (8_192, False, False),
    ("openai", "gpt-4.1"): (1_047_576, True, False),
    ("openai", "ft:anything"): (128_000, True, False),
    ("anthropic", "claude-sonnet-4-5-20250929"): (200_000, True, True),
    ("anthropic", "claude-opus-4-6"): (1_000_000, True, False),
    ("anthropic", "claude-opus-4-8"): (1_000_000, True, False),
    ("anthropic", "claude-sonnet-5"): (1_000_000, True, False),
    ("anthropic", "claude-haiku-5-5"): (1_000_000, True, False),
    ("anthropic", "claude-haiku-4-5-20251001"): (200_000, True, True),
    ("anthropic", "claude-of-the-future"): (200_000, True, False),
    ("deepseek", "deepseek-chat"): (128_000, False, False),
    ("deepseek-beta", "deepseek-chat"): (128_000, False, True),
    ("zai", "GLM-4.6"): (200_000, False, False),
    ("qwen", "qwen-plus"): (128_000, False, True),
    ("kimi-cn", "moonshot-v1-8k"): (8_192, False, True),
    ("ollama", "phi:latest"): (4_096, False, False),
}


@pytest.mark.parametrize(("vendor", "model"), KNOWN)
def test_traits_follow_from_the_name_with_a_careful_default(vendor: str, model: str) -> None:
    """Window, images and continuing are known by pattern, whatever the case; names nobody knows get the default."""
    traits = find_vendor(shipped_vendors(), vendor).traits_of(model)
    assert (traits.context_window, traits.images, traits.continues) == KNOWN[vendor, model]


def test_a_row_of_models_changes_single_fields_of_the_dialect() -> None:
    """What a row does not name stays the vendor's; what ``like`` takes over can be changed field by field."""
    table = shipped_vendors()
    chat, reasoner = (table["deepseek-beta"].api_of(name).dialect for name in ("deepseek-chat", "deepseek-reasoner"))
    assert (chat.prefill, chat.reasoning_back, "named" in chat.tool_choices) == ("prefix", "calls", True)
    assert (reasoner.prefill, reasoner.reasoning_back, "named" in reasoner.tool_choices) == ("prefix", "calls", False)
    assert table["azure"].api_of("d").dialect.max_tokens_field == "max_completion_tokens"
    assert table["azure"].aliases == ()
    claude = [table["anthropic"].api_of(f"claude-{name}").dialect for name in ("3-haiku-20240307", "opus-4-8", "9")]
    assert [(dialect.sampling, dialect.max_tokens) for dialect in claude] == [(True, 4_096)] + [(False, 16_384)] * 2


CLAUDE_REFUSES_PREFILL = (
    *("claude-opus-4-6", "claude-sonnet-4-6", "claude-opus-4-7", "claude-opus-4-8", "claude-opus-5", "claude-opus-5-5"),
    *("claude-sonnet-5", "claude-sonnet-5-5", "claude-haiku-5-5", "claude-fable-5", "claude-fable-5-1"),
    *("claude-fable-5-2", "claude-mythos-5", "claude-of-the-future"),
)


@pytest.mark.parametrize("model", CLAUDE_REFUSES_PREFILL)
def test_no_claude_that_refuses_the_beginning_of_an_answer_is_said_to_continue(model: str) -> None:
    """From 4.6 on the vendor answers 400 to one; a name nobody knows is taken for a later model."""
    assert shipped_vendors()["anthropic"].traits_of(model).continues is False


@pytest.mark.parametrize(
    ("model", "bound", "forced"),
    [
        ("claude-opus-5", False, True),
        ("claude-haiku-5-5", True, True),
        ("claude-sonnet-5-5", True, False),
        ("claude-opus-5-5", True, False),
        ("claude-fable-5-1", True, False),
    ],
)
def test_claudes_that_bind_their_thinking_are_told_to_drop_what_no_longer_fits(
    model: str, bound: bool, forced: bool
) -> None:
    """Tools and history may change between calls here, to which such a model answers 400 by default."""
    api = shipped_vendors()["anthropic"].api_of(model)
    body = json.loads(api.body(ModelRequest([]), model=model, tools=None, tool_names=frozenset(), stream=True))
    assert (body.get("thinking", {}).get("block_binding") == {"prefix_mismatch_behavior": "drop_block"}) is bound
    assert ("thinking-binding-controls-2026-08-01" in api.headers("k").get("anthropic-beta", "")) is bound
    assert api.dialect.forced_tools is forced


WRONG_TABLES = {
    "no object": ([], "no object of objects"),
    "an unknown field": ({"t": ROW | {"colour": "red"}}, "vendor t: .*colour"),
    "a missing field": ({"t": {"title": "T"}}, "vendor t: .*missing"),
    "an unknown API": ({"t": ROW | {"api": "soap"}}, "vendor t: .*soap"),
    "an unknown field of the dialect": ({"t": ROW | {"dialect": {"colour": 1}}}, "vendor t: dialect: .*colour"),
    "a wrong value of the dialect": ({"t": ROW | {"dialect": {"prefill": "maybe"}}}, "vendor t: dialect: .*maybe"),
    "an unknown trait": ({"t": ROW | {"traits": {"wings": 2}}}, "vendor t: traits: .*wings"),
    "a trait of the wrong type": ({"t": ROW | {"traits": {"images": "yes"}}}, "vendor t: traits"),
    "a tiny window": ({"t": ROW | {"traits": {"context_window": 8}}}, "context_window"),
    "continues without a way": ({"t": ROW | {"traits": {"continues": True}}}, "continues"),
    "a wrong row of models": ({"t": ROW | {"models": [{"match": ["x"], "traits": {"wings": 2}}]}}, "wings"),
    "an unknown field of a row": ({"t": ROW | {"models": [{"match": ["x"], "window": 2}]}}, "window"),
    "a row without patterns": ({"t": ROW | {"models": [{"match": []}]}}, "patterns"),
    "a pattern that never fits": ({"t": ROW | {"models": [{"match": ["GPT*"]}]}}, "lower case"),
    "plain http to a stranger": ({"t": ROW | {"base_url": "http://t.example/v1"}}, "https"),
    "a key nobody reads": ({"t": ROW | {"keys": ["T_TOKEN"]}}, "_API_KEY"),
    "a key without a name": ({"t": ROW | {"keys": []}}, "which variable"),
    "a name twice": ({"t": ROW, "u": ROW | {"aliases": ["t"]}}, "taken by t"),
    "like nobody": ({"t": ROW | {"like": "nobody"}}, "like must name"),
    "like one that is like another": ({"t": ROW, "u": {"like": "t", "title": "U"}, "v": {"like": "u"}}, "like must"),
}


@pytest.mark.parametrize("case", WRONG_TABLES)
def test_a_wrong_table_is_refused_with_the_vendor_and_the_fault(case: str) -> None:
    """Every kind of slip is found when the table is read, not when somebody first calls a model."""
    table, told = WRONG_TABLES[case]
    with pytest.raises(ValueError, match=told):
        read_vendors(json.dumps(table))


WRONG_SPECS = {
    "": "model '' is not known",
    "gpt-4o": "model 'gpt-4o' is not known",
    "openai": "openai:NAME, scripted:FILE, scripted",
    "openai:": "openai:NAME, scripted:FILE, scripted",
    "openi:gpt-4o": "did you mean openai.*There are: openai,.*ollama.*custom",
    "zzz:gpt-4o": "'zzz' is not known; There are: openai",
    "ollama+xml:phi": "text or json, not 'xml'",
    "openai:gpt-4o": "set DUALCLAW_MODEL_API_KEY or OPENAI_API_KEY",
    "azure:mine": "azure:mine@https://",
    "custom:mine": "DUALCLAW_MODEL_BASE_URL",
    "ollama:phi,": "model '' is not known",
    "scripted:nowhere.json": "nowhere.json",
    "custom:m@ftp://x": "VENDOR:NAME@http://",
    "custom:@http://x": "VENDOR:NAME@http://",
    "custom:m@http://[::1": "the base URL is no URL",
}


@pytest.mark.parametrize("spec", WRONG_SPECS)
def test_a_wrong_setting_is_told_with_what_would_be_right(spec: str) -> None:
    """Forms, vendors, addresses, keys and scripts each have their text."""
    with pytest.raises(ValueError, match=WRONG_SPECS[spec]):
        model_from_spec(spec)


@pytest.mark.parametrize(
    "spec", ["opnai:m@{}", "custom+x:m@{}", "custom m@{}", "custom:m@ftp{}", "custom:m@http://[{}"]
)
def test_a_wrong_setting_is_told_without_its_address(spec: str) -> None:
    """The address of a model may hold a password or a key."""
    with pytest.raises(ValueError, match=r"model|URL") as refused:
        model_from_spec(spec.format("http://u:pass-word@host/v1?key=query-key"))
    assert "pass-word" not in str(refused.value)
    assert "query-key" not in str(refused.value)


def test_everything_wrong_with_several_models_is_told_at_once() -> None:
    """One fault does not hide the next; only the first vendor is told of the general key."""
    with pytest.raises(ValueError, match="gpt") as refused:
        model_from_spec("openai:gpt-4o,anthropic:claude,nobody:x,azure:y,scripted:nowhere.json")
    text = str(refused.value)
    assert "openai:gpt-4o: vendor openai needs a key: set DUALCLAW_MODEL_API_KEY or OPENAI_API_KEY" in text
    assert "anthropic:claude: vendor anthropic needs a key: set ANTHROPIC_API_KEY" in text
    assert all(each in text for each in ("'nobody'", "azure:y: vendor azure has no address", "nowhere.json"))


async def test_scripted_models_are_made_by_the_same_setting() -> None:
    """Alone it is the scripted model itself; in a list it is one of the router's."""
    assert isinstance(model_from_spec("scripted"), ScriptedModel)
    router = model_from_spec("scripted,ollama:phi")
    assert (type(router), router.name) == (RouterModel, "scripted-assistant,phi")
    await router.aclose()


def completion(kit, text: str = "hi") -> object:
    """Answer in the form of whichever API was asked, not streamed."""
    chat = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
    message = {"type": "message", "role": "assistant", "id": "m1", "model": "m", "stop_reason": "end_turn"}
    messages = message | {"content": [{"type": "text", "text": text}], "usage": {"input_tokens": 1, "output_tokens": 1}}
    output = {"type": "message", "id": "i", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    response = {"id": "r", "object": "response", "status": "completed", "model": "m", "output": [output]}

    async def script(connection, asked) -> None:
        path = urlsplit(asked.line.split()[1]).path
        body = messages if path.endswith("/messages") else response if path.endswith("/responses") else chat
        await kit.answers(200, json.dumps(body).encode())(connection, asked)

    return script


async def asked_of(kit, vendor, spec: str, path: str = "/v1", **arguments: object):
    """Make one call with the model of a setting; return the request that arrived."""
    async with vendor(completion(kit)) as served:
        base = served.url.removesuffix("/v1") + path
        model = model_from_spec(spec, base_url=base, **arguments)
        response = await model.generate(kit.asking())
        await model.aclose()
    assert response.message.parts[0].text == "hi"
    (asked,) = served.asked
    return asked


WIRES = {
    "openai:m": ("/v1", "/v1/chat/completions", "authorization", f"Bearer {KEY}"),
    "openai-responses:m": ("/v1", "/v1/responses", "authorization", f"Bearer {KEY}"),
    "responses:m": ("/v1", "/v1/responses", "authorization", f"Bearer {KEY}"),
    "anthropic:m": ("/v1", "/v1/messages", "x-api-key", KEY),
    "claude:m": ("", "/v1/messages", "x-api-key", KEY),
    "azure:m": ("", "/openai/v1/chat/completions", "api-key", KEY),
    "azure:dep": (
        "/?api-version=2024-10-21",
        "/openai/deployments/dep/chat/completions?api-version=2024-10-21",
        "api-key",
        KEY,
    ),
    "azure:other": ("/openai/v1/", "/openai/v1/chat/completions", "api-key", KEY),
    "azure-responses:m": ("", "/openai/v1/responses", "api-key", KEY),
    "ollama:m": ("", "/v1/chat/completions", "authorization", f"Bearer {KEY}"),
    "gemini:m": ("/v1beta/openai", "/v1beta/openai/chat/completions", "authorization", f"Bearer {KEY}"),
    "custom:m": ("/api", "/api/chat/completions", "authorization", f"Bearer {KEY}"),
}


@pytest.mark.parametrize("spec", WIRES)
async def test_each_api_is_asked_at_its_path_with_the_key_in_its_header(kit, vendor, spec: str) -> None:
    """Path, query and the header of the key are the vendor's; the key is in no other header."""
    path, target, header, value = WIRES[spec]
    asked = await asked_of(kit, vendor, spec, path, api_key=KEY)
    assert asked.line == f"POST {target} HTTP/1.1"
    assert asked.headers[header] == value
    assert [name for name, each in asked.headers.items() if KEY in each] == [header]
    assert asked.json["model"] == spec.partition(":")[2]


async def test_a_dialect_reaches_the_wire(kit, vendor) -> None:
    """What the table says of a vendor is what its requests look like."""
    assert "stream_options" in json.dumps((await streamed(kit, vendor, "openai:m")).json)
    assert "stream_options" not in json.dumps((await streamed(kit, vendor, "mistral:m")).json)


async def streamed(kit, vendor, spec: str):
    """Make one streamed call; return the request that arrived."""
    async with vendor(kit.streams(kit.chunk("hi"), kit.chunk(finish="stop"))) as served:
        model = model_from_spec(spec, base_url=served.url)
        assert (await kit.play(model)).text == "hi"
        await model.aclose()
    return served.asked[0]


async def test_a_vendors_own_key_is_shown_to_no_other_host(kit, vendor) -> None:
    """OPENAI_API_KEY stays here when openai's address was changed; the general key goes where the setting points."""
    environment = {"OPENAI_API_KEY": OWN_KEY, "VLLM_API_KEY": OWN_KEY, "AZURE_OPENAI_API_KEY": OWN_KEY}
    stranger = await asked_of(kit, vendor, "openai:m", environment=environment)
    assert OWN_KEY not in json.dumps(stranger.headers)
    told = await asked_of(kit, vendor, "openai:m", environment=environment, api_key=KEY)
    assert told.headers["authorization"] == f"Bearer {KEY}"
    local = await asked_of(kit, vendor, "vllm:m", environment=environment)
    assert local.headers["authorization"] == f"Bearer {OWN_KEY}"
    azure = await asked_of(kit, vendor, "azure:m", environment=environment)
    assert azure.headers["api-key"] == OWN_KEY


def test_the_first_variable_that_is_set_is_the_key_of_the_vendors_own_host() -> None:
    """DUALCLAW_MODEL_API_KEY wins; an empty variable counts as not set; plain http is not the vendor's host."""
    gemini = find_vendor(shipped_vendors(), "gemini")
    own = gemini.address("m", "")
    assert gemini.key_for(own, "", {"GEMINI_API_KEY": " ", "GOOGLE_API_KEY": "g"}) == "g"
    assert gemini.key_for(own, "general", {"GEMINI_API_KEY": "e"}) == "general"
    assert gemini.key_for(own, None, {"GEMINI_API_KEY": "e"}) == "e"
    assert gemini.key_for(own.replace("https", "http"), "", {"GEMINI_API_KEY": "e"}) == ""


async def test_what_belongs_to_the_first_vendor_is_shown_to_no_other(kit, vendor) -> None:
    """Key and headers of the settings go to the first vendor's models alone; an address can stand in the setting."""
    refusing = kit.answers(503, b"{}")
    async with vendor(refusing) as first, vendor(completion(kit)) as second:
        spec = f"custom:a@{first.url},vllm:b@{second.url}"
        model = model_from_spec(spec, api_key=KEY, headers={"x-team": "secret-team"}, context_window=2048)
        response = await model.generate(kit.asking())
        assert model.traits.context_window == 2048
        await model.aclose()
    assert response.message.parts[0].text == "hi"
    assert (first.asked[0].headers["authorization"], first.asked[0].headers["x-team"]) == (
        f"Bearer {KEY}",
        "secret-team",
    )
    assert "authorization" not in second.asked[0].headers
    assert "x-team" not in second.asked[0].headers


async def test_several_models_are_a_router_over_vendors_and_apis(kit, vendor) -> None:
    """The Restart names vendor and model as the setting does; attempts are counted under those names."""
    seen = []
    away = kit.answers(503, b'{"error":{"message":"away"}}')
    async with vendor(away) as first, vendor(kit.streams(kit.chunk("hi"), kit.chunk(finish="stop"))) as second:
        model = model_from_spec(
            f"anthropic:a@{first.url}, vllm:b@{second.url}", api_key=KEY, observe=lambda *route: seen.append(route)
        )
        chunks = [chunk async for chunk in model.stream(kit.asking())]
        await model.aclose()
    restart = next(chunk for chunk in chunks if isinstance(chunk, Restart))
    assert (restart.model, restart.error.reason) == ("vllm:b", "MODEL_UNAVAILABLE")
    assert seen == [("anthropic:a", "fallback", "MODEL_UNAVAILABLE"), ("vllm:b", "ok", "")]


async def test_a_single_model_has_a_circuit_too(kit, vendor) -> None:
    """After some failures in a row the endpoint is left alone, and the error says until when."""
    async with vendor(kit.answers(503, b"{}")) as served:
        model = model_from_spec("custom:m", base_url=served.url)
        reasons = [(await kit.play(model)).error.message for _ in range(7)]
        await model.aclose()
    assert len(served.asked) == 5
    assert all("Model custom:m is not asked" in message for message in reasons[5:])


@pytest.mark.parametrize("form", ["text", "json"])
async def test_a_model_without_tool_calls_gets_tools_by_suffix(kit, vendor, form: str) -> None:
    """Nothing of the API's own tools is sent; the tool is named in the instructions."""
    async with vendor(completion(kit, '{"answer": "hi"}' if form == "json" else "hi")) as served:
        model: ChatModel = model_from_spec(f"ollama+{form}:phi", base_url=served.url)
        assert model.name == "phi"
        tool = ToolSpec("look_up", "Looks something up.", '{"type":"object","properties":{"q":{"type":"string"}}}')
        response = await model.with_tools([tool]).generate(kit.asking())
        await model.aclose()
    assert response.message.parts[0].text == "hi"
    assert "tools" not in served.asked[0].json
    assert "look_up" in served.asked[0].body.decode()


async def test_answers_that_miss_the_form_of_tools_open_no_circuit(kit, vendor) -> None:
    """A small model that writes broken JSON is there all the same: every call reaches it."""
    async with vendor(completion(kit, '{"tool": ')) as served:
        model = model_from_spec("ollama+json:phi", base_url=served.url)
        bound = model.with_tools([ToolSpec("look_up", "", '{"type":"object"}')])
        for _ in range(8):
            with pytest.raises(ModelError) as raised:
                await bound.generate(kit.asking())
            assert (raised.value.reason, raised.value.retryable) == ("MODEL_BAD_RESPONSE", True)
        await model.aclose()
    assert len(served.asked) == 8


def test_the_defaults_of_the_settings_are_those_of_the_models() -> None:
    """Settings and models cannot see each other; their figures agree all the same."""
    told = {field.name: field.default for field in fields(ModelTimeouts)}
    for name in ("connect", "first_token", "idle", "whole"):
        assert getattr(Settings(), f"model_timeout_{name}") == told[name]


async def test_settings_reach_the_model(kit, vendor) -> None:
    """Key variable, address, headers, window and waits of the environment are those of the call."""
    async with vendor(completion(kit)) as served:
        environ = {
            "DUALCLAW_MODEL": "vllm:m",
            "DUALCLAW_MODEL_BASE_URL": served.url,
            "DUALCLAW_MODEL_HEADERS": '{"x-team": "blue"}',
            "DUALCLAW_MODEL_CONTEXT_WINDOW": "5000",
            "DUALCLAW_STORE": "memory:",
            "VLLM_API_KEY": OWN_KEY,
        }
        parts = make_parts(read_settings(environ)[0])
        await parts.model.generate(kit.asking())
        await parts.model.aclose()
    headers = served.asked[0].headers
    assert (headers["authorization"], headers["x-team"]) == (f"Bearer {OWN_KEY}", "blue")
    assert parts.model.traits.context_window == 5000


async def test_a_wait_of_the_settings_bounds_the_call(kit, vendor) -> None:
    """DUALCLAW_MODEL_TIMEOUT_FIRST_TOKEN ends a call that nobody answers."""

    async def script(connection, asked) -> None:
        await connection.closed_by_peer(10)

    async with vendor(script) as served:
        environ = {
            "DUALCLAW_MODEL": "custom:m",
            "DUALCLAW_MODEL_BASE_URL": served.url,
            "DUALCLAW_MODEL_TIMEOUT_FIRST_TOKEN": "0.2",
            "DUALCLAW_STORE": "memory:",
        }
        parts = make_parts(read_settings(environ)[0])
        outcome = await kit.play(parts.model, within=8)
        await parts.model.aclose()
    assert outcome.error.reason == "MODEL_TIMEOUT"

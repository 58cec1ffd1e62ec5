"""The router: who is asked next after which failure, what the caller sees of it, and what is counted."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from dualclaw_server.engine.model import (
    ModelError,
    ModelRequest,
    ModelResponse,
    ModelTraits,
    ReasoningDelta,
    Restart,
    TextDelta,
    ToolSpec,
)
from dualclaw_server.models import Breaker, BreakerPolicy, GuardedModel, RouteMetrics, RouterModel, ScriptedModel

Item = dict[str, object]


def model(name: str, *say: Item, **traits: object) -> ScriptedModel:
    return ScriptedModel.parse(json.dumps({"name": name, "turns": [{"say": say}], "traits": traits}))


def failing(name: str, reason: str, **fields: object) -> ScriptedModel:
    return model(name, {"fail": reason, "message": f"{name} failed", **fields})


def says(name: str, text: str, **traits: object) -> ScriptedModel:
    return model(name, {"text": text}, **traits)


@dataclass
class Routes:
    """Remembers what it was told."""

    seen: list[tuple[str, str, str]] = field(default_factory=list)

    def __call__(self, name: str, outcome: str, reason: str) -> None:
        self.seen.append((name, outcome, reason))


async def chunks_of(router: RouterModel, request: ModelRequest) -> list[object]:
    """Return what a stream gave, the error last if there was one."""
    found: list[object] = []
    async with asyncio.timeout(60), aclosing(router.stream(request)) as stream:
        try:
            async for chunk in stream:
                found.append(chunk)  # noqa: PERF401  # what came before an error counts
        except ModelError as error:
            found.append(error)
    return found


def shown(chunks: Sequence[object]) -> list[str]:
    """Return chunks in short: texts, ``-> NAME (REASON)`` for a restart, ``= TEXT``, ``! REASON``."""
    found = []
    for chunk in chunks:
        match chunk:
            case TextDelta() | ReasoningDelta():
                found.append(chunk.text)
            case Restart():
                found.append(f"-> {chunk.model} ({chunk.error.reason})")
            case ModelResponse():
                found.append("= " + "".join(part.text for part in chunk.message.parts))
            case ModelError():
                found.append(f"! {chunk.reason}")
    return found


FALLS_OVER = [
    "MODEL_UNAVAILABLE",
    "MODEL_OVERLOADED",
    "MODEL_TIMEOUT",
    "MODEL_STREAM_BROKEN",
    "MODEL_BAD_RESPONSE",
    "MODEL_AUTH",
]


@pytest.mark.parametrize("reason", FALLS_OVER)
async def test_a_failure_goes_to_the_next_model_and_the_caller_is_told(kit, reason: str) -> None:
    """Each of these reasons gives a Restart that names the next model and the failure, then the whole answer."""
    routes = Routes()
    router = RouterModel([failing("a", reason), says("b", "hello"), says("c", "never")], observe=routes)
    chunks = await chunks_of(router, kit.asking())
    assert shown(chunks) == [f"-> b ({reason})", "hello", "= hello"]
    assert chunks[0].error.message == "a failed"
    assert routes.seen == [("a", "fallback", reason), ("b", "ok", "")]
    assert (await router.generate(kit.asking())).message.parts[0].text == "hello"


async def test_the_first_model_that_answers_is_the_only_one_asked(kit) -> None:
    """Without a failure there is no Restart, and one count."""
    routes = Routes()
    router = RouterModel([says("a", "hi"), failing("b", "MODEL_AUTH")], observe=routes)
    assert shown(await chunks_of(router, kit.asking())) == ["hi", "= hi"]
    assert routes.seen == [("a", "ok", "")]


async def test_a_break_in_mid_stream_is_shown_and_then_restarted(kit) -> None:
    """What was shown stays before the Restart; what follows is the next model's whole answer."""
    broken = model("a", {"reasoning": "hm"}, {"text": "Hel"}, {"fail": "MODEL_STREAM_BROKEN"})
    router = RouterModel([broken, says("b", "Hello")])
    chunks = await chunks_of(router, kit.asking())
    assert shown(chunks) == ["hm", "Hel", "-> b (MODEL_STREAM_BROKEN)", "Hello", "= Hello"]


async def test_a_chain_of_failures_restarts_at_each_model(kit) -> None:
    """Three models, two failures, two Restarts, in order."""
    router = RouterModel([failing("a", "MODEL_TIMEOUT"), failing("b", "MODEL_AUTH"), says("c", "x")])
    assert shown(await chunks_of(router, kit.asking())) == ["-> b (MODEL_TIMEOUT)", "-> c (MODEL_AUTH)", "x", "= x"]


async def test_overflow_goes_only_to_a_later_model_with_a_larger_window(kit) -> None:
    """Models that are no larger are passed over; where none is larger the overflow is the error."""
    small = model("a", {"fail": "CONTEXT_OVERFLOW"}, context_window=8000)
    router = RouterModel(
        [small, says("same", "no", context_window=8000), says("large", "yes", context_window=9000)], name="r"
    )
    assert shown(await chunks_of(router, kit.asking())) == ["-> large (CONTEXT_OVERFLOW)", "yes", "= yes"]
    router = RouterModel([small, says("same", "no", context_window=8000)])
    assert shown(await chunks_of(router, kit.asking())) == ["! CONTEXT_OVERFLOW"]
    with pytest.raises(ModelError) as raised:
        await router.generate(kit.asking())
    assert raised.value.reason == "CONTEXT_OVERFLOW"


async def test_a_beginning_to_continue_is_for_the_first_model_only(kit) -> None:
    """After a Restart the next model gives the whole answer, not what follows the beginning."""
    turns = [{"when": {"prefix": "^Hel$"}, "say": [{"text": "Hello"}]}, {"say": [{"text": "whole"}]}]
    continuing = ScriptedModel.parse(json.dumps({"name": "b", "turns": turns, "traits": {"continues": True}}))
    request = ModelRequest(kit.asking().messages, prefix="Hel")
    assert shown(await chunks_of(RouterModel([continuing]), request)) == ["lo", "= lo"]
    router = RouterModel([failing("a", "MODEL_TIMEOUT"), continuing])
    assert shown(await chunks_of(router, request)) == ["-> b (MODEL_TIMEOUT)", "whole", "= whole"]


async def test_generate_goes_on_from_a_beginning_with_models_that_can(kit) -> None:
    """It has no Restart, so its answer is what follows the beginning whoever gives it; others are passed over."""
    continuing = model("c", {"text": "Hello"}, continues=True)
    router = RouterModel([failing("a", "MODEL_TIMEOUT"), says("b", "Hello"), continuing])
    request = ModelRequest(kit.asking().messages, prefix="Hel")
    assert (await router.generate(request)).message.parts[0].text == "lo"
    with pytest.raises(ModelError) as raised:
        await RouterModel([failing("a", "MODEL_TIMEOUT"), says("b", "Hello")]).generate(request)
    assert raised.value.reason == "MODEL_TIMEOUT"


ALL_FAIL = {
    "one may be back": (["MODEL_AUTH", "MODEL_OVERLOADED", "MODEL_BAD_RESPONSE"], "MODEL_OVERLOADED", True),
    "the first of equals": (["MODEL_TIMEOUT", "MODEL_UNAVAILABLE"], "MODEL_TIMEOUT", True),
    "overflow before a refused key": (["MODEL_AUTH", "CONTEXT_OVERFLOW"], "CONTEXT_OVERFLOW", False),
    "a retry before an overflow": (["MODEL_UNAVAILABLE", "CONTEXT_OVERFLOW"], "MODEL_UNAVAILABLE", True),
    "nothing helps": (["MODEL_AUTH", "MODEL_BAD_RESPONSE"], "MODEL_AUTH", False),
}


@pytest.mark.parametrize("case", ALL_FAIL)
async def test_when_all_fail_the_most_useful_failure_is_raised(kit, case: str) -> None:
    """Retryable if any was; the text names every model and why, and the last failure is no fallback."""
    reasons, expected, retryable = ALL_FAIL[case]
    routes = Routes()
    router = RouterModel([failing(name, each) for name, each in zip("abc", reasons, strict=False)], observe=routes)
    error = (await chunks_of(router, kit.asking()))[-1]
    assert isinstance(error, ModelError)
    assert (error.reason, error.retryable) == (expected, retryable)
    assert all(f"{name}: {name} failed" in error.message for name in "abc"[: len(reasons)])
    assert [outcome for _, outcome, _ in routes.seen] == ["fallback"] * (len(reasons) - 1) + ["failed"]
    with pytest.raises(ModelError) as raised:
        await router.generate(kit.asking())
    assert (raised.value.reason, raised.value.retryable) == (expected, retryable)


async def test_the_error_of_a_single_model_is_its_own(kit) -> None:
    """A router of one changes nothing about the error, its hint and its detail."""
    error = (await chunks_of(RouterModel([failing("a", "MODEL_AUTH")]), kit.asking()))[-1]
    assert (error.reason, error.message) == ("MODEL_AUTH", "a failed")


async def test_trying_again_makes_sense_when_the_soonest_may_be_back(kit) -> None:
    """Retry-After of the whole is the smallest; unknown as soon as one that may be back names none."""
    a, b = failing("a", "MODEL_OVERLOADED", retry_after=20), failing("b", "MODEL_OVERLOADED", retry_after=7)
    assert (await chunks_of(RouterModel([a, b]), kit.asking()))[-1].retry_after == 7
    silent = failing("c", "MODEL_TIMEOUT")
    assert (await chunks_of(RouterModel([a, b, silent]), kit.asking()))[-1].retry_after is None
    refused = failing("d", "MODEL_AUTH")
    assert (await chunks_of(RouterModel([a, refused]), kit.asking()))[-1].retry_after == 20


async def test_a_model_with_an_open_circuit_is_passed_over(kit) -> None:
    """Once its circuit is open the next model is asked without waiting, and it is counted as "open"."""
    routes = Routes()
    down = model("a", {"fail": "MODEL_UNAVAILABLE", "message": "away"})
    router = RouterModel([down, says("b", "x")], breaker=BreakerPolicy(failures=2, cooldown=60), observe=routes)
    for _ in range(2):
        await chunks_of(router, kit.asking())
    chunks = await chunks_of(router.with_tools([ToolSpec("f", "", "{}")]), kit.asking())
    assert shown(chunks) == ["-> b (MODEL_UNAVAILABLE)", "x", "= x"]
    assert "circuit is open" in chunks[0].error.message
    assert routes.seen[-2:] == [("a", "open", "MODEL_UNAVAILABLE"), ("b", "ok", "")]


async def test_when_all_circuits_are_open_the_call_may_be_tried_when_the_first_closes(kit) -> None:
    """No model is asked; the error is retryable and says when."""
    policy = BreakerPolicy(failures=1, cooldown=60)
    router = RouterModel([failing("a", "MODEL_TIMEOUT"), failing("b", "MODEL_UNAVAILABLE")], breaker=policy)
    await chunks_of(router, kit.asking())
    error = (await chunks_of(router, kit.asking()))[-1]
    assert (error.reason, error.retryable) == ("MODEL_UNAVAILABLE", True)
    assert 50 < error.retry_after <= 75


async def test_a_failure_that_tells_more_wins_over_an_open_circuit(kit) -> None:
    """Of two retryable failures the one that happened is told, not the one that was not tried."""
    down = GuardedModel(failing("a", "MODEL_UNAVAILABLE"), Breaker("a", BreakerPolicy(failures=1, cooldown=60)))
    await kit.play(down)
    error = (await chunks_of(RouterModel([down, failing("b", "MODEL_TIMEOUT")]), kit.asking()))[-1]
    assert (error.reason, error.retryable) == ("MODEL_TIMEOUT", True)


@pytest.mark.parametrize("how", ["stream", "generate"])
async def test_cancelling_never_falls_over(kit, how: str) -> None:
    """A cancelled call ends there: the next model is not asked and nothing is counted."""
    routes = Routes()
    router = RouterModel([model("a", {"hang": True}), says("b", "never")], observe=routes)
    call = chunks_of(router, kit.asking()) if how == "stream" else router.generate(kit.asking())
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert routes.seen == []


async def test_closing_the_stream_at_a_restart_asks_nobody_else(kit) -> None:
    """A consumer that leaves when it learns of the failure ends the call there."""
    routes = Routes()
    router = RouterModel([failing("a", "MODEL_TIMEOUT"), says("b", "never")], observe=routes)
    async with asyncio.timeout(60), aclosing(router.stream(kit.asking())) as stream:
        assert isinstance(await anext(stream), Restart)
    assert routes.seen == [("a", "fallback", "MODEL_TIMEOUT")]


async def test_usage_of_failed_attempts_is_told_once(kit, vendor) -> None:
    """A stream tells it in each Restart, and ``generate``, which has none, in the sum."""
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    cut = kit.streams(kit.chunk("par"), {"choices": [], "usage": usage}, {"error": {"code": 503, "message": "away"}})
    async with vendor(cut) as served, kit.model_at(served) as broken:
        second = model("b", {"text": "x"}, {"usage": {"input_tokens": 5}})
        router = RouterModel([broken, second])
        chunks = await chunks_of(router, kit.asking())
        generated = await router.generate(kit.asking())
    restart = next(chunk for chunk in chunks if isinstance(chunk, Restart))
    assert restart.error.usage.input_tokens == 7
    assert chunks[-1].usage.input_tokens == 5
    assert (generated.usage.input_tokens, generated.usage.output_tokens) == (12, 2)
    assert not generated.usage.HasField("cached_tokens")


async def test_a_sum_of_usages_stays_what_a_usage_can_hold(kit, vendor) -> None:
    """Vendors may report any number; the sum of two is no reason to lose an answer."""
    cut = kit.streams(
        {"choices": [], "usage": {"prompt_tokens": 2**31 - 1}}, {"error": {"code": 503, "message": "away"}}
    )
    async with vendor(cut) as served, kit.model_at(served) as broken:
        router = RouterModel([broken, model("b", {"text": "x"}, {"usage": {"input_tokens": 5}})])
        generated = await router.generate(kit.asking())
    assert generated.usage.input_tokens == 2**31 - 1


def test_traits_are_what_every_model_can_do() -> None:
    """The smallest window, and no image or tool call that one of them lacks; the first decides on continuing."""
    first = says("a", "", context_window=9000, continues=True)
    second = says("b", "", context_window=4000, images=False, native_tools=False)
    assert RouterModel([first, second]).traits == ModelTraits(4000, True, False, False)
    assert RouterModel([second, first]).traits == ModelTraits(4000, False, False, False)
    assert RouterModel([first, first]).traits == ModelTraits(9000, True, True, True)


def test_a_router_has_a_name_and_models() -> None:
    """It is called like its models unless it is given a name; without a model there is none."""
    assert RouterModel([says("a", ""), says("b", "")]).name == "a,b"
    assert RouterModel([says("a", "")], name="best").name == "best"
    with pytest.raises(ValueError, match="at least one"):
        RouterModel([])
    with pytest.raises(ValueError, match="a label for each"):
        RouterModel([says("a", "")], labels=["x", "y"])


async def test_labels_are_what_models_are_called(kit) -> None:
    """In Restarts, counts and errors, also where two models have one name."""
    routes = Routes()
    twins = [failing("a", "MODEL_TIMEOUT"), failing("a", "MODEL_AUTH")]
    router = RouterModel(twins, labels=["here:a", "there:a"], observe=routes)
    chunks = await chunks_of(router, kit.asking())
    assert shown(chunks)[0] == "-> there:a (MODEL_TIMEOUT)"
    assert "here:a: a failed there:a: a failed" in chunks[-1].message
    assert [name for name, *_ in routes.seen] == ["here:a", "there:a"]


async def test_tools_reach_every_model(kit) -> None:
    """The model that takes over has the same tools as the one before it; the router itself keeps none."""
    bound = ScriptedModel.parse(
        json.dumps({"name": "b", "turns": [{"when": {"tools": "f"}, "say": [{"text": "bound"}]}, {"say": []}]})
    )
    router = RouterModel([failing("a", "MODEL_TIMEOUT"), bound])
    with_tools = router.with_tools([ToolSpec("f", "", "{}")])
    assert shown(await chunks_of(with_tools, kit.asking()))[-1] == "= bound"
    assert shown(await chunks_of(router, kit.asking()))[-1] == "= "


async def test_closing_closes_every_model(kit, vendor) -> None:
    """Connections of all its models are gone afterwards."""
    script = kit.streams(kit.chunk("x"), kit.chunk(finish="stop"))
    async with kit.vendor_of(script, keep_alive=True) as served:
        router = RouterModel([kit.OpenAIChatModel("a", served.url), kit.OpenAIChatModel("b", served.url)])
        assert shown(await chunks_of(router, kit.asking()))[-1] == "= x"
        await router.aclose()
        async with asyncio.timeout(60):
            while served.open:  # noqa: ASYNC110  # the server has no event for it
                await asyncio.sleep(0.01)


async def test_attempts_are_counted_by_the_metrics_api(kit) -> None:
    """``aiflow_llm_route_total`` has the labels model, outcome and reason."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    router = RouterModel(
        [failing("a", "MODEL_TIMEOUT"), says("b", "x")], observe=RouteMetrics(provider.get_meter("test"))
    )
    for _ in range(2):
        await chunks_of(router, kit.asking())
    (metric,) = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    counted = {tuple(sorted(point.attributes.items())): point.value for point in metric.data.data_points}
    provider.shutdown()
    assert metric.name == "aiflow_llm_route_total"
    assert counted == {
        (("model", "a"), ("outcome", "fallback"), ("reason", "MODEL_TIMEOUT")): 2,
        (("model", "b"), ("outcome", "ok"), ("reason", "")): 2,
    }
    RouteMetrics()("a", "ok", "")

"""Tools by role: what the rules say, and that it holds for what models see and for what they call."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualclaw_server.engine.interceptor import Observation
from dualclaw_server.engine.outcome import Replace
from dualclaw_server.engine.tool import Tool, tool
from dualclaw_server.interceptors.permission import Effect, PermissionInterceptor, Rule

from .traces import call_of, config_of, make_trace, prompt_of


def tool_named(name: str, server: str = "") -> Tool:
    async def nothing() -> str:
        """Do nothing."""
        return ""

    made = tool(name=name)(nothing)
    return Tool(made.name, made.description, made.parameters, made.function, server=server)


OPERATORS = Rule(("delete_*",), ("operator",))
NOBODY = Rule(("delete_all",), effect="deny")
NO_GUESTS = Rule(("search",), ("guest",), "deny")
GITHUB = Rule(("github/*",), ("dev*",))


@pytest.mark.parametrize(
    ("rules", "default", "roles", "name", "may"),
    [
        ([], "deny", {"user"}, "search", False),
        ([], "allow", {"user"}, "search", True),
        ([], "allow", set(), "search", True),
        ([OPERATORS], "allow", {"operator"}, "delete_file", True),
        ([OPERATORS], "allow", {"user"}, "delete_file", False),
        ([OPERATORS], "allow", set(), "delete_file", False),
        ([OPERATORS], "allow", {"user"}, "search", True),
        ([OPERATORS], "deny", {"operator"}, "search", False),
        ([OPERATORS], "deny", {"user", "operator"}, "delete_file", True),
        ([OPERATORS, NOBODY], "allow", {"operator"}, "delete_all", False),
        ([NOBODY, OPERATORS], "allow", {"operator"}, "delete_all", False),
        ([NO_GUESTS], "allow", {"guest"}, "search", False),
        ([NO_GUESTS], "allow", {"guest", "operator"}, "search", False),
        ([NO_GUESTS], "allow", {"user"}, "search", True),
        ([NO_GUESTS], "deny", {"user"}, "search", False),
        ([Rule(("*",))], "deny", set(), "search", True),
        ([Rule(("Delete_*",))], "deny", {"user"}, "delete_file", False),
        ([GITHUB], "allow", {"developer"}, "github/merge", True),
        ([GITHUB], "allow", {"user"}, "github/merge", False),
        ([GITHUB], "allow", {"user"}, "merge", True),
        ([Rule(("mer?e",), ("user",))], "deny", {"user"}, "github/merge", True),
        ([Rule(("*/*",), effect="deny")], "allow", {"user"}, "github/merge", False),
    ],
)
async def test_rules_decide_alike_for_what_is_seen_and_what_is_called(
    rules: list[Rule], default: Effect, roles: set[str], name: str, may: bool
) -> None:
    """One verdict: the tool is in the run, in the prompt and callable, or none of it."""
    server, _, short = name.rpartition("/")
    interceptor = PermissionInterceptor(rules, default=default)
    trace = make_trace(roles=sorted(roles))
    wanted = tool_named(short, server)
    config = await interceptor.before_agent(trace, config_of(wanted))
    prompt = prompt_of(trace, tools=[wanted])
    await interceptor.on_reason_start(trace, prompt)
    outcome = await interceptor.on_tool_call_start(trace, call_of(trace, name=short, tool=wanted))
    assert interceptor.may(roles, short, server) is may
    assert (wanted in config.tools, wanted in prompt.tools, outcome is None) == (may, may, may)


async def test_a_refused_call_is_told_to_the_model_and_to_people() -> None:
    """The model gets JSON with code, message and hint, people a diagnosis; nothing happened."""
    trace = make_trace()
    interceptor = PermissionInterceptor([OPERATORS], default="allow")
    outcome = await interceptor.on_tool_call_start(trace, call_of(trace, name="delete_file"))
    assert isinstance(outcome, Replace)
    observation = outcome.value
    assert isinstance(observation, Observation)
    error = json.loads(observation.text)["error"]
    assert error["code"] == "permission.denied"
    assert error["message"] == "The user may not use delete_file."
    assert error["retryable"] is False
    assert "without it" in error["hint"]
    assert observation.is_error
    assert observation.not_done
    assert observation.diagnosis is not None
    assert observation.diagnosis.code == "permission.denied"
    chinese = PermissionInterceptor([OPERATORS], locale="zh")
    outcome = await chinese.on_tool_call_start(trace, call_of(trace, name="delete_file"))
    assert isinstance(outcome, Replace)
    assert isinstance(outcome.value, Observation)
    assert "无权" in outcome.value.text


async def test_a_tool_that_does_not_exist_is_left_to_the_engine() -> None:
    """A misspelt name gets the engine's list of names, not a refusal; one that a rule forbids is refused."""
    trace = make_trace()
    interceptor = PermissionInterceptor([OPERATORS])
    assert await interceptor.on_tool_call_start(trace, call_of(trace, name="serach")) is None
    assert await interceptor.on_tool_call_start(trace, call_of(trace, name="delete_x")) is not None


async def test_a_sub_agent_acts_for_the_same_caller() -> None:
    """What the caller may not do, an agent that works for it may not do either."""
    parent = make_trace(roles=["user"])
    child = make_trace(parent=parent, agent="helper")
    interceptor = PermissionInterceptor([OPERATORS], default="allow")
    wanted = tool_named("delete_file")
    assert (await interceptor.before_agent(child, config_of(wanted))).tools == ()
    assert await interceptor.on_tool_call_start(child, call_of(child, name="delete_file", tool=wanted)) is not None


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Rule(()), "tools"),
        (lambda: Rule("search"), "tools"),  # type: ignore[arg-type]
        (lambda: Rule(("a", "")), "tools"),
        (lambda: Rule(("a",), ()), "roles"),
        (lambda: Rule(("a",), effect="maybe"), "effect"),  # type: ignore[arg-type]
        (lambda: PermissionInterceptor([], default="ask"), "default"),  # type: ignore[arg-type]
    ],
)
def test_rules_that_mean_nothing_are_refused(make: type[Rule], part: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=part):
        make()


def test_it_is_a_guard() -> None:
    """It fails closed and callers never switch it."""
    interceptor = PermissionInterceptor([])
    assert (interceptor.name, interceptor.fail_closed, interceptor.switchable) == ("permission", True, False)


ROLES = st.frozensets(st.sampled_from(["user", "operator", "guest"]))
RULES = st.builds(
    Rule,
    st.lists(st.sampled_from(["search", "s*", "delete", "*", "hub/*"]), min_size=1, max_size=2).map(tuple),
    st.lists(st.sampled_from(["user", "operator", "g*", "*"]), min_size=1, max_size=2).map(tuple),
    st.sampled_from(["allow", "deny"]),
)


@given(
    st.lists(RULES, max_size=5), ROLES, st.sampled_from(["search", "delete"]), st.sampled_from(["", "hub"]), st.data()
)
def test_denials_win_and_order_means_nothing(
    rules: list[Rule], roles: frozenset[str], name: str, server: str, data: st.DataObject
) -> None:
    """Any order of rules gives the same verdict; one more deny rule never allows anything."""
    interceptor = PermissionInterceptor(rules)
    shuffled = PermissionInterceptor(data.draw(st.permutations(rules)))
    assert interceptor.may(roles, name, server) == shuffled.may(roles, name, server)
    tighter = PermissionInterceptor([*rules, data.draw(RULES.filter(lambda rule: rule.effect == "deny"))])
    assert interceptor.may(roles, name, server) or not tighter.may(roles, name, server)

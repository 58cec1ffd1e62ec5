"""Plain reads: runs, conversations, messages, agents, and what is not there."""

import pytest

from dualclaw import Agent, ContentPart, Conversation, InterruptItem, Message, Role, Run, RunState, Usage
from dualclaw.errors import EngineError


async def test_a_run_is_protobuf_json_with_the_names_of_the_proto_files(web, fake_engine):
    """Zero and empty are written, unknown counts are absent, integers are numbers."""
    fake_engine.runs["r"] = Run(id="r", state=RunState.RUN_STATE_RUNNING, last_seq=0, usage=Usage(input_tokens=0))
    answer = await web.http.get("/v1/runs/r")
    assert answer.headers["content-type"] == "application/json"
    run = answer.json()["run"]
    assert (run["id"], run["state"], run["last_seq"], run["conversation_id"]) == ("r", "RUN_STATE_RUNNING", 0, "")
    assert run["usage"] == {"input_tokens": 0}


async def test_runs_are_listed_by_page_state_and_conversation(web, fake_engine):
    """States may be repeated or separated by commas, with or without their prefix."""
    for index, state in enumerate((RunState.RUN_STATE_RUNNING, RunState.RUN_STATE_FAILED, RunState.RUN_STATE_QUEUED)):
        fake_engine.runs[f"r{index}"] = Run(id=f"r{index}", state=state, conversation_id="c")
    query = "states=running,RUN_STATE_FAILED&states=queued&conversation_id=c&page_size=2"
    page = (await web.http.get(f"/v1/runs?{query}")).json()
    assert [run["id"] for run in page["runs"]] == ["r0", "r1"]
    rest = (await web.http.get(f"/v1/runs?{query}&page_token={page['next_page_token']}")).json()
    assert [run["id"] for run in rest["runs"]] == ["r2"]
    assert rest["next_page_token"] == ""
    only = (await web.http.get("/v1/runs?states=failed")).json()
    assert [run["id"] for run in only["runs"]] == ["r1"]


async def test_a_query_takes_both_name_styles(web, fake_engine):
    """Parameters are spelt as in bodies: by the proto files or in camel case, and are the same parameter."""
    for index in range(3):
        fake_engine.runs[f"r{index}"] = Run(id=f"r{index}", conversation_id="c" if index else "d")
    page = (await web.http.get("/v1/runs?pageSize=1&conversationId=c")).json()
    assert [run["id"] for run in page["runs"]] == ["r1"]
    rest = (await web.http.get(f"/v1/runs?conversationId=c&pageToken={page['next_page_token']}")).json()
    assert [run["id"] for run in rest["runs"]] == ["r2"]
    twice = await web.http.get("/v1/runs?pageSize=1&page_size=2")
    assert twice.json()["error"]["fields"] == {"page_size": "may be given once"}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("state=running", "state"),
        ("states=walking", "states"),
        ("states=unspecified&page_size=-1", "page_size"),
        ("page_size=many", "page_size"),
        ("page_size=1&page_size=2", "page_size"),
    ],
)
async def test_a_query_that_is_not_understood_is_400(web, query, field):
    """A misspelt filter must not answer with everything."""
    answer = await web.http.get(f"/v1/runs?{query}")
    assert answer.status_code == 400
    assert field in answer.json()["error"]["fields"]


async def test_conversations_are_listed_read_and_deleted(web, fake_engine):
    """What the page needs to show, reopen and delete conversations."""
    fake_engine.conversations["c"] = Conversation(id="c", title="你好")
    fake_engine.messages["c"] = [
        Message(id="m1", role=Role.ROLE_USER, parts=[ContentPart(text="你好")]),
        Message(id="m2", role=Role.ROLE_ASSISTANT, parts=[ContentPart(text="hi")]),
    ]
    assert (await web.http.get("/v1/conversations")).json()["conversations"][0]["title"] == "你好"
    assert (await web.http.get("/v1/conversations/c")).json()["conversation"]["active_run_id"] == ""
    page = (await web.http.get("/v1/conversations/c/messages?page_size=1")).json()
    assert page["messages"][0]["parts"] == [{"text": "你好"}]
    assert page["messages"][0]["role"] == "ROLE_USER"
    assert (await web.http.delete("/v1/conversations/c")).json() == {}
    gone = await web.http.delete("/v1/conversations/c")
    assert (gone.status_code, gone.json()["error"]["reason"]) == (404, "UNKNOWN_CONVERSATION")


async def test_agents_are_listed(web, fake_engine):
    """The page offers the choice the engine has."""
    fake_engine.agents["a"] = Agent(name="a", description="does things")
    assert (await web.http.get("/v1/agents")).json()["agents"][0]["name"] == "a"


async def test_an_agent_is_read_with_its_models(web, fake_engine):
    """One agent by its name; an unknown one is 404."""
    fake_engine.agents["a b"] = Agent(name="a b", models=["local"])
    assert (await web.http.get("/v1/agents/a%20b")).json()["agent"]["models"] == ["local"]
    assert (await web.http.get("/v1/agents/none")).json()["error"]["reason"] == "UNKNOWN_AGENT"


async def test_a_refused_read_is_json_too(web, fake_engine):
    """Reads answer failures the same way as starts."""
    fake_engine.refuse["ListConversations"] = EngineError("UNAUTHENTICATED", "a key is needed")
    answer = await web.http.get("/v1/conversations")
    assert answer.status_code == 401
    assert answer.json()["error"]["message"] == "a key is needed"


async def test_what_is_not_there_is_404_and_a_wrong_method_405(web):
    """Both are JSON, and 405 says what is possible."""
    missing = await web.http.get("/v2/runs")
    assert (missing.status_code, missing.json()["error"]["reason"]) == (404, "INVALID_REQUEST")
    wrong = await web.http.put("/v1/runs")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "GET, POST"
    assert (await web.http.get("/messages/stream")).status_code == 405


async def test_an_engine_that_is_not_there_is_503_and_no_store_is_blamed(web, fake_engine):
    """The reason is its code's, the words are true, the engine's address stays in the log; the gateway is healthy."""
    await fake_engine.close()
    for answer in (await web.http.get("/v1/agents"), await web.http.post("/v1/runs", json={"message": {}})):
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert (error["reason"], error["metadata"]["engine"]) == ("STORE_UNAVAILABLE", "unreachable")
        assert error["message"] == "the gateway cannot reach its engine"
        assert "dualclaw-server" in error["hint"]
        assert fake_engine.target not in answer.text
    assert (await web.http.get("/healthz")).json() == {"status": "ok"}


async def test_a_store_in_trouble_is_told_apart_from_an_engine_that_is_away(web, fake_engine):
    """The same reason and status in the engine's own words."""
    fake_engine.refuse["ListAgents"] = EngineError("STORE_UNAVAILABLE", "the disk is full")
    answer = await web.http.get("/v1/agents")
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["message"] == "the disk is full"
    assert "engine" not in error["metadata"]


async def test_what_has_no_json_form_is_500_as_json(web, fake_engine, caplog):
    """A time beyond all calendars, say: the caller is told as of any failure, and the log has the cause."""
    item = InterruptItem(id="q")
    item.expire_time.seconds = 10**15
    fake_engine.runs["r"] = Run(id="r", interrupts=[item])
    answer = await web.http.get("/v1/runs/r")
    assert answer.status_code == 500
    assert answer.json()["error"]["reason"] == "INTERNAL"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "expire_time" in caplog.text
    assert (await web.http.get("/healthz")).status_code == 200

from pathlib import Path

import pytest

from dualclaw_server.settings import Settings, SettingsError, described_settings, is_loopback, read_settings


def problems_of(environ: dict[str, str]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read_settings(environ)
    return caught.value.problems


def test_an_empty_environment_gives_a_server_for_this_machine_alone() -> None:
    """Without any setting the engine listens on loopback and keeps its runs in the current folder."""
    settings, warnings = read_settings({})
    assert (settings.listen, settings.store, settings.model) == ("127.0.0.1:50051", "sqlite:dualclaw.db", "auto")
    assert (settings.grace, settings.max_receive_bytes, settings.max_send_bytes) == (30, 16 << 20, 64 << 20)
    assert warnings == []


def test_an_empty_value_counts_as_not_set() -> None:
    """A variable that is there but empty, as compose files make them, leaves the default."""
    settings, _ = read_settings({"DUALCLAW_STORE": "", "DUALCLAW_KEYS_FILE": " "})
    assert settings.store == "sqlite:dualclaw.db"
    assert settings.keys_file is None


@pytest.mark.parametrize("role", ["api", "worker"])
def test_a_role_needs_a_store_that_processes_share(role: str) -> None:
    """In memory, nobody could work on what an api process stores; the default role has no need of others."""
    (problem,) = problems_of({"DUALCLAW_ROLE": role, "DUALCLAW_STORE": "memory:"})
    assert problem.startswith(f"DUALCLAW_ROLE: {role} needs a store that processes share")
    assert "use sqlite:PATH or nats://HOST, or role all" in problem
    assert read_settings({"DUALCLAW_ROLE": role})[0].role == role
    assert read_settings({"DUALCLAW_STORE": "memory:"})[0].role == "all"


def test_losing_data_is_accepted_only_in_so_many_words() -> None:
    """Off unless it is switched on."""
    assert read_settings({})[0].accept_loss is False
    assert read_settings({"DUALCLAW_ACCEPT_LOSS": "1"})[0].accept_loss is True


def test_the_stores_address_is_shown_without_its_password() -> None:
    """Logs and errors name hosts, never who logs in there."""
    settings = read_settings({"DUALCLAW_STORE": "nats://me:secret@one:4222,two:4222?replicas=3"})[0]
    assert settings.shown_store == "nats://one:4222,two:4222?replicas=3"


def test_lease_and_retention_have_bounds() -> None:
    """30 s and 7 days by default; 0 days keep for ever; what cannot work is refused by name."""
    settings, _ = read_settings({})
    assert (settings.lease, settings.retention) == (30, 7)
    assert read_settings({"DUALCLAW_RETENTION": "0"})[0].retention == 0
    problems = problems_of({"DUALCLAW_ROLE": "boss", "DUALCLAW_LEASE": "0.1", "DUALCLAW_RETENTION": "-1"})
    assert {problem.split(":")[0] for problem in problems} == {
        "DUALCLAW_ROLE",
        "DUALCLAW_LEASE",
        "DUALCLAW_RETENTION",
    }


def test_a_command_line_option_wins_over_the_environment() -> None:
    """An option that was given stands in for its variable; one that was not given changes nothing."""
    environ = {"DUALCLAW_STORE": "memory:", "DUALCLAW_LISTEN": "127.0.0.1:1"}
    settings, _ = read_settings(environ, {"listen": "127.0.0.1:2", "store": None})
    assert (settings.listen, settings.store) == ("127.0.0.1:2", "memory:")


def test_all_faults_are_told_at_once_each_with_its_name(tmp_path: Path) -> None:
    """Wrong values, missing files and settings that contradict each other all come in one go."""
    problems = problems_of(
        {
            "DUALCLAW_LISTEN": "nonsense",
            "DUALCLAW_GRACE": "-1",
            "DUALCLAW_ALLOW_ANONYMOUS": "perhaps",
            "DUALCLAW_AGENTS": "no colon",
            "DUALCLAW_KEYS_FILE": str(tmp_path / "absent.json"),
            "DUALCLAW_TLS_CLIENT_CA": __file__,
        }
    )
    text = "\n".join(problems)
    for name in ("LISTEN", "GRACE", "ALLOW_ANONYMOUS", "AGENTS", "KEYS_FILE", "TLS_CLIENT_CA"):
        assert f"DUALCLAW_{name}:" in text
    assert len(problems) == 6


def test_an_error_carries_the_warnings_and_what_is_right() -> None:
    """A fault hides neither a misspelt name nor what the other settings name; the faulty ones are not among them."""
    environ = {
        "DUALCLAW_GRACE": "soon",
        "DUALCLAW_LISTEN": "0.0.0.0:1",
        "DUALCLAW_TLS_CERT": __file__,
        "DUALCLAW_STORE": "tape:x",
        "DUALCLAW_MODLE": "x",
    }
    with pytest.raises(SettingsError) as caught:
        read_settings(environ)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "DUALCLAW_GRACE",
        "DUALCLAW_TLS_CERT and DUALCLAW_TLS_KEY",
        "DUALCLAW_LISTEN",
    ]
    assert caught.value.warnings == ["DUALCLAW_MODLE: no such setting; did you mean DUALCLAW_MODEL?"]
    assert caught.value.rest is not None
    assert (caught.value.rest.store, caught.value.rest.grace) == ("tape:x", 30)


def test_agents_without_an_attribute_are_told_the_form() -> None:
    """The example is the one of the README."""
    (problem,) = problems_of({"DUALCLAW_AGENTS": "my_agents"})
    assert problem == "DUALCLAW_AGENTS: must be MODULE:ATTRIBUTE, such as my_agents:AGENT"


def test_every_setting_is_described_once_with_its_default() -> None:
    """Whatever the engine reads has a name that works, a default and a sentence; no key and no type shows up."""
    described = list(described_settings())
    names = [name for name, _, _ in described]
    assert len(set(names)) == len(names) == len(Settings.model_fields) + 3
    _, warnings = read_settings(dict.fromkeys((name for name in names if name.startswith("DUALCLAW_")), ""))
    assert warnings == []
    assert all(text.endswith(".") and "`" not in text and default for _, default, text in described)
    defaults = {name: default for name, default, _ in described}
    assert defaults["DUALCLAW_LISTEN"] == "127.0.0.1:50051"
    assert defaults["DUALCLAW_GRACE"] == "30"
    assert defaults["DUALCLAW_ALLOW_ANONYMOUS"] == "0"
    assert defaults["DUALCLAW_MODEL_API_KEY"] == defaults["DUALCLAW_KEYS_FILE"] == "none"
    assert defaults["OTEL_SERVICE_NAME"] == "dualclaw-server"
    assert {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER"} <= set(names)


def test_the_key_of_the_model_is_in_no_error_and_no_dump() -> None:
    """Whatever is wrong, and however settings are printed, the key stays out of it."""
    environ = {"DUALCLAW_MODEL_API_KEY": "sk-very-secret", "DUALCLAW_GRACE": "sk-very-secret"}
    assert "very-secret" not in "".join(problems_of(environ))
    settings, _ = read_settings({"DUALCLAW_MODEL_API_KEY": "sk-very-secret"})
    assert "very-secret" not in f"{settings!r} {settings} {settings.model_dump_json()}"


def test_keys_of_vendors_are_taken_as_secrets_by_their_usual_names() -> None:
    """Every NAME_API_KEY but our own is there for a model to ask for; none is in a dump, and none is warned of."""
    environ = {
        "OPENAI_API_KEY": " sk-one-secret ",
        "NEW_VENDOR_API_KEY": "sk-two-secret",
        "EMPTY_API_KEY": " ",
        "DUALCLAW_API_KEY": "sk-client-secret",
        "DUALCLAW_MODEL_API_KEY": "sk-general-secret",
        "API_KEY_OF": "x",
    }
    settings, warnings = read_settings(environ)
    assert settings.keys_for_model == {"OPENAI_API_KEY": "sk-one-secret", "NEW_VENDOR_API_KEY": "sk-two-secret"}
    assert warnings == []
    assert "-secret" not in f"{settings!r} {settings} {settings.model_dump_json()}"
    assert "-secret" not in "".join(problems_of(environ | {"DUALCLAW_GRACE": "-1"}))


def test_headers_of_the_model_are_a_json_object_and_secret() -> None:
    """Anything else is refused without being repeated; they are among the values to be masked."""
    settings, _ = read_settings(
        {"DUALCLAW_MODEL_HEADERS": '{"x-key": "h-secret"}', "DUALCLAW_MODEL_API_KEY": "k-secret"}
    )
    assert settings.headers_for_model == {"x-key": "h-secret"}
    assert set(settings.secrets) == {"k-secret", "h-secret"}
    assert "-secret" not in f"{settings!r} {settings.model_dump_json()}"
    for wrong in ("x-key: h-secret", '["h-secret"]', '{"h-secret": 1}'):
        (problem,) = problems_of({"DUALCLAW_MODEL_HEADERS": wrong})
        assert problem.startswith("DUALCLAW_MODEL_HEADERS: must be a JSON object of texts")
        assert "h-secret" not in problem


def test_waits_and_window_of_the_model_have_bounds() -> None:
    """No wait is nothing or endless; a context window is no slip of the pen."""
    settings, _ = read_settings({"DUALCLAW_MODEL_TIMEOUT_IDLE": "2.5", "DUALCLAW_MODEL_CONTEXT_WINDOW": "8192"})
    assert (settings.model_timeout_idle, settings.model_context_window) == (2.5, 8192)
    wrong = {f"DUALCLAW_MODEL_TIMEOUT_{name}": value for name, value in (("CONNECT", "0"), ("IDLE", "inf"))}
    names = [problem.partition(":")[0] for problem in problems_of(wrong | {"DUALCLAW_MODEL_CONTEXT_WINDOW": "8"})]
    assert names == ["DUALCLAW_MODEL_CONTEXT_WINDOW", "DUALCLAW_MODEL_TIMEOUT_CONNECT", "DUALCLAW_MODEL_TIMEOUT_IDLE"]


@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:50051", "192.0.2.1:50051", "example.com:50051"])
def test_an_address_others_can_reach_needs_keys_or_a_clear_wish(listen: str) -> None:
    """Without a keys file only loopback is served, unless anonymous access is asked for."""
    assert "DUALCLAW_ALLOW_ANONYMOUS=1" in problems_of({"DUALCLAW_LISTEN": listen})[0]
    assert read_settings({"DUALCLAW_LISTEN": listen, "DUALCLAW_ALLOW_ANONYMOUS": "1"})[0].listen == listen
    assert read_settings({"DUALCLAW_LISTEN": listen, "DUALCLAW_KEYS_FILE": __file__})[0].listen == listen


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:0", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/tmp/engine.sock", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("localhost.example.com:1", False),
    ],
)
def test_loopback_is_recognised_by_address_and_not_by_looks(address: str, loopback: bool) -> None:
    """Only addresses that no other machine can reach count as loopback."""
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(
    "listen", ["50051", ":50051", "localhost", "localhost:x", "localhost:65536", "::1:50051", "unix:"]
)
def test_an_unusable_address_is_refused(listen: str) -> None:
    """What is not host and port is told so, with the forms that would be right."""
    assert problems_of({"DUALCLAW_LISTEN": listen}) == ["DUALCLAW_LISTEN: must be HOST:PORT, [IPV6]:PORT or unix:PATH"]


def test_a_misspelt_name_is_warned_of_and_other_services_names_are_not() -> None:
    """A name nobody reads is told with the one that was likely meant; the web gateway's names are fine."""
    _, warnings = read_settings(
        {
            "DUALCLAW_LISTN": "x",
            "DUALCLAW_OTLP_ENDPOINT": "x",
            "DUALCLAW_NOPE": "x",
            "DUALCLAW_WEB_LISTEN": "x",
            "DUALCLAW_ENGINE": "x",
            "DUALCLAW_API_KEY": "x",
            "PATH": "x",
        }
    )
    assert warnings == [
        "DUALCLAW_LISTN: no such setting; did you mean DUALCLAW_LISTEN?",
        "DUALCLAW_NOPE: no such setting",
        "DUALCLAW_OTLP_ENDPOINT: no such setting",
    ]


def test_spans_are_exported_only_where_the_standard_names_say_so() -> None:
    """The OTLP endpoint comes from OTEL_* alone, the more specific name wins, and `none` switches it off."""
    general = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}
    assert read_settings({})[0].otlp_endpoint == ""
    assert read_settings(general)[0].otlp_endpoint == "http://a:4317"
    assert read_settings(general | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b"})[0].otlp_endpoint == "http://b"
    assert read_settings(general | {"OTEL_TRACES_EXPORTER": "none"})[0].otlp_endpoint == ""


def test_half_a_pair_of_tls_files_is_refused() -> None:
    """A certificate without its key, or the reverse, is a fault and not a silent plain-text server."""
    for name in ("DUALCLAW_TLS_CERT", "DUALCLAW_TLS_KEY"):
        assert "one without the other" in problems_of({name: __file__})[0]


def test_settings_cannot_be_changed() -> None:
    """A settings object is a value."""
    with pytest.raises(ValueError, match="frozen"):
        Settings().listen = "x"  # type: ignore[misc]


def test_keys_in_the_addresses_of_models_are_secrets_too() -> None:
    """Users, passwords and queries count, as written and as meant; they are in no repr either."""
    environ = {
        "DUALCLAW_MODEL_BASE_URL": "https://bob:p%2Fass-word@host/v1?api-version=2024-10-21&key=query-key,1",
        "DUALCLAW_MODEL": "custom:m@https://user-key@other/v1,custom:n@https://third/v1?k=third-key",
    }
    settings, _ = read_settings(environ)
    assert set(settings.secrets) == {"p%2Fass-word", "p/ass-word", "query-key,1", "user-key", "third-key"}
    assert not any(secret in repr(settings) for secret in settings.secrets)

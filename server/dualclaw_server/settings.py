"""The engine's settings: environment variables ``DUALCLAW_*``, read here and nowhere else.

Everything wrong is found before anything starts and told at once, one line each, without the value of
anything that may be a secret; so an error carries what is right too, for ``app.part_problems`` to look at.
Names nobody knows are warned of, because a misspelt setting would otherwise just not apply; names of the
other services are known. The docstrings of the fields are what ``--help`` says.

Model vendors have usual names for their keys (``OPENAI_API_KEY``). Which vendor has which is not known here; so
every name that ends in ``_API_KEY`` is taken as a secret that a model may ask for.

``OTEL_*`` names keep their standard meaning. Two of them are looked at here, to decide whether spans are
exported at all; the OpenTelemetry SDK reads the others itself.
"""

import difflib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import unquote_plus, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FilePath,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

PREFIX: Final = "DUALCLAW_"

OTHER_SERVICES: Final = frozenset({"DUALCLAW_ENGINE", "DUALCLAW_API_KEY"})
"""Names that mean something to another service, or to tests."""
OTHER_PREFIXES: Final = ("DUALCLAW_WEB_", "DUALCLAW_IM_", "DUALCLAW_A2A_", "DUALCLAW_ENGINE_", "DUALCLAW_TEST_")

VENDOR_KEY_SUFFIX: Final = "_API_KEY"
"""How the names of the model vendors' own keys end."""

_USERINFO: Final = re.compile(r"//[^@/?]*@")
_ADDRESS: Final = re.compile(r"https?://[^\s,]+", re.IGNORECASE)

_ALLOW = "set DUALCLAW_KEYS_FILE, listen on a loopback address, or set DUALCLAW_ALLOW_ANONYMOUS=1 (role user only)"

_SHARE = "needs a store that processes share, and memory: is of one alone; use sqlite:PATH or nats://HOST"


class SettingsError(Exception):
    """The settings cannot be used.

    Args:
        problems: one readable line for each fault.
        warnings: what is to be warned of besides, as ``read_settings`` would have returned it.
        rest: the settings that are right, for looking at what they name; no server may be made of them.
    """

    def __init__(self, problems: list[str], warnings: Sequence[str] = (), rest: "Settings | None" = None) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.warnings = warnings
        self.rest = rest


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[IPV6]:PORT``; a ``unix:PATH`` is (itself, 0).

    Raises:
        ValueError: it is neither.
    """
    if address.startswith("unix:") and len(address) > len("unix:"):
        return address, 0
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(address)
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise ValueError(address)
    if bracketed:
        ipaddress.IPv6Address(host[1:-1].partition("%")[0])
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Tell whether an address can be reached from this machine alone."""
    host, _ = split_address(address)
    if host.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def _address(value: str) -> str:
    try:
        split_address(value)
    except ValueError:
        raise PydanticCustomError("address", "must be HOST:PORT, [IPV6]:PORT or unix:PATH") from None
    return value


def _reference(value: str) -> str:
    for reference in value.split(",") if value else ():
        module, colon, attribute = reference.strip().partition(":")
        if not (colon and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))):
            raise PydanticCustomError("reference", "must be MODULE:ATTRIBUTE, such as my_agents:AGENT")
    return value


def _headers(value: SecretStr) -> SecretStr:
    try:
        found = json.loads(value.get_secret_value() or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise PydanticCustomError("headers", 'must be a JSON object of texts, such as {"x-team": "a"}')
    return value


_Seconds = Annotated[float, Field(gt=0, le=3_600, allow_inf_nan=False)]


class Settings(BaseModel):
    """What the engine is told by its environment."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    listen: Annotated[str, AfterValidator(_address)] = "127.0.0.1:50051"
    """Address to serve at; port 0 takes a free one."""
    role: Literal["all", "api", "worker"] = "all"
    """What this process does: api answers calls, worker works on runs and answers health checks only, all does both."""
    workers: int = Field(1, ge=1, le=256)
    """Processes that share the address, and the store; as many as there are cores for them."""
    store: str = Field("sqlite:dualclaw.db", min_length=1)
    """Where runs live: ``sqlite:PATH``, ``memory:``, or ``nats://HOST:PORT,...`` (docs/nats.md)."""
    accept_loss: bool = False
    """Whether NATS servers that could lose acknowledged data will do: one replica, or a lazy sync."""
    model: str = Field("auto", min_length=1, repr=False)
    """The model of agents that name none: ``VENDOR:NAME`` (several by commas), ``local``, ``scripted:FILE``, ``auto``.

    ``auto`` is ``local`` where that is installed, else ``scripted``.
    """
    model_base_url: str = Field("", repr=False)
    """Endpoint of the model's vendor, the first of several; none: the vendor's own."""
    model_api_key: SecretStr = SecretStr("")
    """Key for that vendor; none: that of the vendor's own variable, such as OPENAI_API_KEY."""
    model_headers: Annotated[SecretStr, AfterValidator(_headers)] = SecretStr("")
    """JSON object of headers sent to that vendor in addition."""
    model_context_window: int | None = Field(None, ge=1_024, le=100_000_000)
    """Tokens that vendor's models take, input and output together; none: what is known of the model."""
    model_timeout_connect: _Seconds = 10.0
    """Seconds until the connection to a model's endpoint must stand."""
    model_timeout_first_token: _Seconds = 60.0
    """Seconds until a model must begin to answer."""
    model_timeout_idle: _Seconds = 60.0
    """Seconds a model may fall silent in the middle of its answer."""
    model_timeout_whole: _Seconds = 600.0
    """Seconds for an answer that is not streamed."""
    agents: Annotated[str, AfterValidator(_reference)] = ""
    """``MODULE:ATTRIBUTE`` of an Agent, a list or a function, several by commas; none: the assistant that ships."""
    capacity: int = Field(1_000, ge=1, le=1_000_000)
    """Runs at work at once in this process; more wait."""
    keys_file: FilePath | None = None
    """JSON ``[{"key_sha256", "tenant", "subject", "roles"}]`` of who may call; none: anybody on this machine."""
    allow_anonymous: bool = False
    """Serve other machines without a keys file."""
    lease: float = Field(30.0, ge=0.5, le=3_600, allow_inf_nan=False)
    """Seconds a run stays with a process that gives no sign of life; then another one goes on with it."""
    retention: float = Field(7.0, ge=0, le=36_500, allow_inf_nan=False)
    """Days that the events of a run are kept after its end; 0: for ever, as its messages always are."""
    grace: float = Field(30.0, ge=0, le=3_600, allow_inf_nan=False)
    """Seconds that runs at work may take to end once the server is told to stop."""
    tls_cert: FilePath | None = None
    """PEM chain of the server; with DUALCLAW_TLS_KEY."""
    tls_key: FilePath | None = None
    """PEM key of the server; with DUALCLAW_TLS_CERT."""
    tls_client_ca: FilePath | None = None
    """PEM roots; clients must then show a certificate signed by one (mTLS)."""
    max_receive_bytes: int = Field(16 << 20, ge=4_096, le=1 << 30)
    """Largest request, in bytes."""
    max_send_bytes: int = Field(64 << 20, ge=1 << 20, le=1 << 30)
    """Largest response message, in bytes."""
    otlp_endpoint: str = ""
    """Where spans go by OTLP over gRPC; none: no spans are made. The name with TRACES in it wins."""
    otlp_metrics_endpoint: str = ""
    """Where metrics go by OTLP over gRPC; none: where OTEL_EXPORTER_OTLP_ENDPOINT says, or nowhere."""
    service_name: str = "dualclaw-server"
    """Name of this service in spans and metrics."""
    vendor_keys: Mapping[str, SecretStr] = Field(default_factory=dict)
    """The keys of model vendors under the vendors' own names, such as OPENAI_API_KEY."""

    @property
    def secrets(self) -> Sequence[str]:
        """Every value that must be in no log and no error; those in the addresses of models are among them."""
        keys = [self.model_api_key, *self.vendor_keys.values()]
        addresses = [self.model_base_url, *_ADDRESS.findall(self.model)]
        return [
            *filter(None, (key.get_secret_value() for key in keys)),
            *self.headers_for_model.values(),
            *(secret for address in addresses for secret in _secrets_in(address)),
        ]

    @property
    def shown_store(self) -> str:
        """The store's address for people: without the name and password of NATS."""
        return _USERINFO.sub("//", self.store)

    @property
    def headers_for_model(self) -> Mapping[str, str]:
        """What ``model_headers`` says."""
        headers: dict[str, str] = json.loads(self.model_headers.get_secret_value() or "{}")
        return headers

    @property
    def keys_for_model(self) -> Mapping[str, str]:
        """The values of ``vendor_keys``."""
        return {name: key.get_secret_value() for name, key in self.vendor_keys.items()}

    @model_validator(mode="after")
    def _agree(self) -> "Settings":
        problems = []
        if (self.tls_cert is None) != (self.tls_key is None):
            problems.append("DUALCLAW_TLS_CERT and DUALCLAW_TLS_KEY: one without the other is no use; set both")
        if self.role != "all" and self.store == "memory:":
            problems.append(f"DUALCLAW_ROLE: {self.role} {_SHARE}, or role all")
        if self.workers > 1 and self.store == "memory:":
            problems.append(f"DUALCLAW_WORKERS: more than one {_SHARE}, or one worker")
        if self.workers > 1 and self.listen.startswith("unix:"):
            problems.append("DUALCLAW_WORKERS: workers share a port, a socket file they cannot; listen on HOST:PORT")
        if self.tls_client_ca is not None and self.tls_cert is None:
            problems.append("DUALCLAW_TLS_CLIENT_CA: needs DUALCLAW_TLS_CERT and DUALCLAW_TLS_KEY")
        if self.keys_file is None and not self.allow_anonymous and not is_loopback(self.listen):
            problems.append(f"DUALCLAW_LISTEN: {self.listen} can be reached from other machines; {_ALLOW}")
        if problems:
            raise SettingsError(problems)
        return self


def _secrets_in(address: str) -> Iterator[str]:
    """Yield the parts of an address that may be keys, as they are written and as they are meant."""
    try:
        parts = urlsplit(address)
        found = [parts.password or parts.username or ""]
    except ValueError:
        return  # no address at all, and refused as one elsewhere
    for pair in filter(None, parts.query.split("&")):
        name, _, value = pair.partition("=")
        if name != "api-version":
            found.append(value)
    for secret in filter(None, found):
        yield secret
        if (meant := unquote_plus(secret)) != secret:
            yield meant


_COLLECTED: Final = frozenset({"vendor_keys"})
"""Fields that no single variable sets."""

_STANDARD_NAMES: Final = (
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "otlp_endpoint"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "otlp_metrics_endpoint"),
    ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "otlp_endpoint"),  # the more specific ones win
    ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "otlp_metrics_endpoint"),
    ("OTEL_SERVICE_NAME", "service_name"),
)
_SWITCHES: Final = {"OTEL_TRACES_EXPORTER": "otlp_endpoint", "OTEL_METRICS_EXPORTER": "otlp_metrics_endpoint"}
"""With the value none they take an endpoint away."""


def read_settings(
    environ: Mapping[str, str], overrides: Mapping[str, str | None] | None = None
) -> tuple[Settings, list[str]]:
    """Return the settings and warnings about names nobody knows; an empty value counts as not set.

    Args:
        environ: the process's environment.
        overrides: values of command line options by field name; None: not given.

    Raises:
        SettingsError: with every fault there is.
    """
    others = {*(field for _, field in _STANDARD_NAMES), *_COLLECTED}
    own = {PREFIX + field.upper(): field for field in Settings.model_fields if field not in others}
    values: dict[str, object] = {}
    for name, field in (*own.items(), *_STANDARD_NAMES):
        if environ.get(name, "").strip():
            values[field] = environ[name].strip()
    values |= {field: value for field, value in (overrides or {}).items() if value is not None}
    values["vendor_keys"] = {
        name: environ[name].strip()
        for name in environ
        if name.endswith(VENDOR_KEY_SUFFIX) and not name.startswith(PREFIX) and environ[name].strip()
    }
    for name, field in _SWITCHES.items():
        if environ.get(name, "").strip() == "none":
            values.pop(field, None)
    warnings = [_warning(name, own) for name in sorted(environ) if _unknown(name, own)]
    wrong: set[str] = set()
    try:
        return Settings.model_validate(values), warnings
    except SettingsError as crossed:
        problems = crossed.problems
    except ValidationError as error:
        wrong = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        problems = [_line(detail) for detail in error.errors()] + _crossed(values, wrong)
    raise SettingsError(problems, warnings, _rest(values, wrong))


def described_settings() -> Iterator[tuple[str, str, str]]:
    """Yield name, default and meaning of every environment variable that is read; without a default it is "none"."""
    standard = {field: name for name, field in reversed(_STANDARD_NAMES)}
    standard["otlp_metrics_endpoint"] = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"  # the general name is told already
    for field, info in Settings.model_fields.items():
        text = (info.description or "").partition("\n")[0].replace("``", "")
        if field in _COLLECTED:
            yield f"*{VENDOR_KEY_SUFFIX}", "none", text
            continue
        yield standard.get(field, PREFIX + field.upper()), _shown(info.default), text
        if field == "otlp_endpoint":
            yield "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "none", "The same, for spans alone."
            yield "OTEL_TRACES_EXPORTER", "otlp", "With the value none, no spans are made whatever the endpoint."
        if field == "otlp_metrics_endpoint":
            yield "OTEL_METRICS_EXPORTER", "otlp", "With the value none, nothing is counted whatever the endpoint."


def _shown(default: object) -> str:
    match default:
        case None | "":
            return "none"
        case SecretStr():
            return "none"
        case bool():
            return str(int(default))
        case float():
            return f"{default:g}"
    return str(default)


def _rest(values: Mapping[str, object], wrong: set[str]) -> Settings:
    """Return the settings that are right by themselves, in a form in which none can contradict another."""
    right = {field: value for field, value in values.items() if field not in wrong and not field.startswith("tls_")}
    return Settings.model_validate(right | {"allow_anonymous": "1"})


def _crossed(values: Mapping[str, object], wrong: set[str]) -> list[str]:
    """Return what is wrong between fields too: pydantic looks at that only once every field is right."""
    try:
        Settings.model_validate(
            {field: value for field, value in values.items() if field not in wrong} | _stand_ins(wrong)
        )
    except SettingsError as crossed:
        return crossed.problems
    return []


def _stand_ins(wrong: set[str]) -> dict[str, str]:
    # A file that was named but is unreadable still counts as named.
    here = str(Path(__file__))
    return {field: here for field in ("keys_file", "tls_cert", "tls_key", "tls_client_ca") if field in wrong}


def _line(detail: ErrorDetails) -> str:
    field = str(detail["loc"][0])
    names = {field: name for name, field in reversed(_STANDARD_NAMES)}
    name = names.get(field, PREFIX + field.upper())
    text = "must name a file that exists" if detail["type"] == "path_not_file" else detail["msg"]
    return f"{name}: {text[:1].lower()}{text[1:]}"


def _unknown(name: str, own: Mapping[str, str]) -> bool:
    return (
        name.startswith(PREFIX)
        and name not in own
        and name not in OTHER_SERVICES
        and not name.startswith(OTHER_PREFIXES)
    )


def _warning(name: str, own: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(
        name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in own], n=1, cutoff=0.7
    )
    return f"{name}: no such setting" + (f"; did you mean {PREFIX}{near[0]}?" if near else "")

"""The engine's settings: environment variables ``DUALCLAW_*``, read here and nowhere else.

Everything wrong is found before anything starts and told at once, one line each, without the value of
anything that may be a secret. Names nobody knows are warned of, because a misspelt setting would
otherwise just not apply; names of the other services are known.

``OTEL_*`` names keep their standard meaning. Two of them are looked at here, to decide whether spans are
exported at all; the OpenTelemetry SDK reads the others itself.
"""

import difflib
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

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

OTHER_SERVICES: Final = frozenset({"DUALCLAW_ENGINE", "DUALCLAW_API_KEY", "DUALCLAW_ACCEPT_LOSS"})
"""Names that mean something to another service, or to tests."""
OTHER_PREFIXES: Final = ("DUALCLAW_WEB_", "DUALCLAW_IM_", "DUALCLAW_A2A_", "DUALCLAW_ENGINE_", "DUALCLAW_TEST_")

_ALLOW = "set DUALCLAW_KEYS_FILE, listen on a loopback address, or set DUALCLAW_ALLOW_ANONYMOUS=1 (role user only)"


class SettingsError(Exception):
    """The settings cannot be used; ``problems`` has one readable line for each fault."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


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
    module, colon, attribute = value.partition(":")
    if value and not (colon and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))):
        raise PydanticCustomError("reference", "must be MODULE:ATTRIBUTE, such as my_agents:agents")
    return value


class Settings(BaseModel):
    """What the engine is told by its environment."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    listen: Annotated[str, AfterValidator(_address)] = "127.0.0.1:50051"
    """Address to serve at; port 0 takes a free one."""
    store: str = Field("sqlite:dualclaw.db", min_length=1)
    """Where runs live: ``sqlite:PATH`` or ``memory:``."""
    model: str = Field("scripted", min_length=1)
    """The model of agents that name none: ``scripted``, ``scripted:FILE``, ``openai:NAME``, ..."""
    model_base_url: str = ""
    """Endpoint of the model's vendor; empty: the vendor's own."""
    model_api_key: SecretStr = SecretStr("")
    """Key for that endpoint."""
    agents: Annotated[str, AfterValidator(_reference)] = ""
    """``MODULE:ATTRIBUTE`` of the agents to serve; empty: the assistant that ships."""
    keys_file: FilePath | None = None
    """Who may call, see servicers/access.py; None: anybody on this machine."""
    allow_anonymous: bool = False
    """Serve other machines without a keys file."""
    grace: float = Field(30.0, ge=0, le=3_600, allow_inf_nan=False)
    """Seconds that runs at work may take to end once the server is told to stop."""
    tls_cert: FilePath | None = None
    """PEM chain of the server; with ``tls_key``."""
    tls_key: FilePath | None = None
    """PEM key of the server."""
    tls_client_ca: FilePath | None = None
    """PEM roots; clients must then show a certificate signed by one (mTLS)."""
    max_receive_bytes: int = Field(16 << 20, ge=4_096, le=1 << 30)
    """Largest request."""
    max_send_bytes: int = Field(64 << 20, ge=1 << 20, le=1 << 30)
    """Largest response message."""
    otlp_endpoint: str = ""
    """Where spans go, from the standard OTEL_* names; empty: nowhere."""
    service_name: str = "dualclaw-server"
    """Name of this service in spans, from OTEL_SERVICE_NAME."""

    @model_validator(mode="after")
    def _agree(self) -> "Settings":
        problems = []
        if (self.tls_cert is None) != (self.tls_key is None):
            problems.append("DUALCLAW_TLS_CERT and DUALCLAW_TLS_KEY: one without the other is no use; set both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            problems.append("DUALCLAW_TLS_CLIENT_CA: needs DUALCLAW_TLS_CERT and DUALCLAW_TLS_KEY")
        if self.keys_file is None and not self.allow_anonymous and not is_loopback(self.listen):
            problems.append(f"DUALCLAW_LISTEN: {self.listen} can be reached from other machines; {_ALLOW}")
        if problems:
            raise SettingsError(problems)
        return self


_STANDARD_NAMES: Final[Mapping[str, str]] = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "otlp_endpoint",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "otlp_endpoint",  # the more specific one wins
    "OTEL_SERVICE_NAME": "service_name",
}


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
    own = {PREFIX + field.upper(): field for field in Settings.model_fields if field not in _STANDARD_NAMES.values()}
    values: dict[str, str] = {}
    for name, field in (*own.items(), *_STANDARD_NAMES.items()):
        if environ.get(name, "").strip():
            values[field] = environ[name].strip()
    values |= {field: value for field, value in (overrides or {}).items() if value is not None}
    if environ.get("OTEL_TRACES_EXPORTER", "").strip() == "none":
        values.pop("otlp_endpoint", None)
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError([_line(detail) for detail in error.errors()] + _crossed(values, error)) from None
    return settings, [_warning(name, own) for name in sorted(environ) if _unknown(name, own)]


def _crossed(values: Mapping[str, str], error: ValidationError) -> list[str]:
    """Return what is wrong between fields too: pydantic looks at that only once every field is right."""
    wrong = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
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
    names = {value: name for name, value in _STANDARD_NAMES.items()}
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

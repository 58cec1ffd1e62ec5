"""Settings of the clients: the one place that reads their environment.

``load_settings(WebSettings)`` returns a frozen object or raises SettingsError with every problem at once, one a
line, each under the name of its variable; values are never repeated, because one of them is a key. An empty
variable counts as not set. A ``DUALCLAW_*`` name that no program of dualclaw reads is most likely a typing
error: ``unknown_names`` says so, and the program goes on.

SettingsError   one or more variables are wrong
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, FilePath, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from dualclaw_clients.engine_client import EngineClient

_S = TypeVar("_S", bound="ClientSettings")
_PREFIX = "DUALCLAW_"
_HOST = r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\[\]]+)"
_ADDRESS = re.compile(_HOST + r":(?P<port>\d{1,5})")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://" + _HOST + r"(:(?P<port>\d{1,5}))?/?")

ENGINE_NAMES = frozenset(
    _PREFIX + name
    for name in [
        "LISTEN",
        "STORE",
        "GRACE",
        "MODEL",
        "MODEL_BASE_URL",
        "MODEL_API_KEY",
        "AGENTS",
        "KEYS_FILE",
        "ALLOW_ANONYMOUS",
        "ACCEPT_LOSS",
        "ROLE",
        "LEASE",
        "RETENTION",
    ]
)
"""Variables of the engine's own settings, known here only so that they are not taken for mistakes."""
ENGINE_GROUPS = tuple(
    _PREFIX + name for name in ("MODEL_", "STORE_", "JWT_", "TLS_", "MAX_", "LOG_", "LIMIT_", "A2A_", "IM_", "TEST_")
)
"""Beginnings of names that belong to the engine as well."""


class SettingsError(Exception):
    """One or more variables are wrong; ``problems`` has a line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def check_target(value: str) -> str:
    """Check the address of an engine: HOST:PORT, or a name of gRPC's (unix:PATH, dns:///HOST:PORT, ...)."""
    if re.match(r"(unix:|unix-abstract:|dns:|ipv4:|ipv6:|xds:)", value):
        return value
    return _host_port(value, lowest=1)


def _host_port(value: str, *, lowest: int) -> str:
    found = _ADDRESS.fullmatch(value)
    if found is None:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051")
    if not lowest <= int(found["port"]) <= 65_535:
        raise ValueError(f"the port must be {lowest} to 65535")
    return value


def check_listen(value: str) -> str:
    """Check an address to listen at: HOST:PORT, where port 0 takes a free one."""
    return _host_port(value, lowest=0)


def _origin(value: str) -> str:
    found = _ORIGIN.fullmatch(value)
    if found is None or int(found["port"] or 1) not in range(1, 65_536):
        raise ValueError("must be SCHEME://HOST or SCHEME://HOST:PORT, such as https://chat.example, without a path")
    return value


Target = Annotated[str, AfterValidator(check_target)]
Listen = Annotated[str, AfterValidator(check_listen)]
Origin = Annotated[str, AfterValidator(_origin)]


class ClientSettings(BaseSettings):
    """What every client needs to reach an engine. Variables: the field's name in capitals after ``DUALCLAW_``."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_ignore_empty=True, frozen=True, extra="ignore", hide_input_in_errors=True,
        use_attribute_docstrings=True,  # the programs' --help is made of them
    )  # fmt: skip

    engine: Target = "127.0.0.1:50051"
    """Address of the engine."""
    api_key: SecretStr = SecretStr("")
    """Key of this client; empty: none is sent."""
    engine_tls: bool = False
    """True: TLS, trusting the system's authorities."""
    engine_ca_file: FilePath | None = None
    """PEM of the authorities to trust instead; implies TLS."""
    engine_cert_file: FilePath | None = None
    """PEM of the client's certificate, for mutual TLS; implies TLS."""
    engine_key_file: FilePath | None = None
    """PEM of the certificate's key."""

    @model_validator(mode="after")
    def _certificate_with_key(self) -> "ClientSettings":
        if (self.engine_cert_file is None) != (self.engine_key_file is None):
            raise ValueError("DUALCLAW_ENGINE_CERT_FILE and DUALCLAW_ENGINE_KEY_FILE go together; set both or none")
        return self

    def connect(self, engine: str = "", *, own_key: bool = True) -> EngineClient:
        """Return a client of the engine, or of the one given. Raises SettingsError for an unreadable file.

        ``own_key`` False: it holds no key, so a call that brings none goes out without.
        """
        return EngineClient(
            engine or self.engine,
            token=self.api_key.get_secret_value() if own_key else "",
            tls=self.engine_tls or self.engine_cert_file is not None,
            root_certificates=_content(self.engine_ca_file),
            certificate_chain=_content(self.engine_cert_file),
            private_key=_content(self.engine_key_file),
        )


class WebSettings(ClientSettings):
    """Settings of the web gateway."""

    web_listen: Listen = "127.0.0.1:8080"
    """Where it listens; port 0: any free one."""
    web_origins: Annotated[tuple[Origin, ...], NoDecode] = ()
    """Origins that browsers may call from (CORS), with commas between them, such as https://chat.example; the
    gateway's own is always allowed."""
    web_max_body: int = Field(default=1024 * 1024, ge=1024)
    """Longest request body in bytes."""

    @model_validator(mode="before")
    @classmethod
    def _split_origins(cls, values: dict[str, object]) -> dict[str, object]:
        return _with_list(values, "web_origins")


class ImSettings(ClientSettings):
    """Settings of the IM claw. The gate's two variables have no prefix: older deployments know them so."""

    model_config = SettingsConfigDict(populate_by_name=True)

    im_state: str = ""
    """Path of the relay's SQLite file; empty: the console keeps nothing over a restart."""
    use_engine_core: str = Field(default="off", validation_alias="IM_USE_ENGINE_CORE")
    """Whose messages the engine answers: off, on, or a list of tenants."""
    legacy_url: str = Field(default="", validation_alias="IM_LEGACY_URL")
    """Where messages go while the gate is off."""


def load_settings(kind: type[_S], overrides: Mapping[str, str | None] | None = None) -> _S:
    """Read settings from the environment. Raises SettingsError.

    ``overrides`` has values of command line options by field name; None: not given.
    """
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    try:
        return kind(**given)  # type: ignore[arg-type]  # texts, as from the environment; pydantic reads them
    except ValidationError as error:
        raise SettingsError(_problem(kind, found["loc"], found["msg"]) for found in error.errors()) from None


def editor() -> str:
    """Return the command of the person's text editor, by the usual variables; empty: none is set."""
    return os.environ.get("VISUAL", "").strip() or os.environ.get("EDITOR", "").strip()


def unknown_names(names: Iterable[str] | None = None) -> list[str]:
    """Return a warning for each ``DUALCLAW_*`` variable (of the environment, if none are given) nobody reads."""
    known = ENGINE_NAMES | {
        variable for kind in (ClientSettings, WebSettings, ImSettings) for variable in variables_of(kind)
    }
    warnings = []
    for name in sorted(os.environ if names is None else names):
        if not name.startswith(_PREFIX) or name in known or name.startswith(ENGINE_GROUPS):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        warnings.append(f"{name} is no setting of dualclaw" + (f"; did you mean {near[0]}?" if near else ""))
    return warnings


def variables_of(kind: type[ClientSettings]) -> list[str]:
    """Return the names of the variables a class of settings reads."""
    return [str(field.validation_alias or _PREFIX + name.upper()) for name, field in kind.model_fields.items()]


def _problem(kind: type[ClientSettings], place: tuple[int | str, ...], text: str) -> str:
    text = text.removeprefix("Value error, ")
    if not place:
        return text
    name = str(place[0])
    variable = _PREFIX + name.upper() if name in kind.model_fields else name
    entry = f"entry {place[1] + 1} " if len(place) > 1 and isinstance(place[1], int) else ""
    return f"{variable}: {entry}{text[:1].lower()}{text[1:]}"


def _with_list(values: dict[str, object], name: str) -> dict[str, object]:
    given = values.get(name)
    if not isinstance(given, str):
        return values
    return {**values, name: tuple(part for item in given.split(",") if (part := item.strip()))}


def _content(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError([f"{path} cannot be read: {error.strerror}"]) from None

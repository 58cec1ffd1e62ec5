"""The table of vendors, read from ``vendors.json``, and a model made from one of its rows.

Rules and their reasons:

- A vendor is data; what a field cannot say is not done for one vendor alone.
- The figures are careful ones. A window that is too small costs an early summary, one too large a failed call; an
  image that is not sent is noted, one that is refused fails the run. ``traits`` and ``dialect`` hold for all of a
  vendor's models; the first row of ``models`` with a pattern that fits replaces what it names.
- A vendor's own variable (``OPENAI_API_KEY``) is sent to the vendor's own host alone: whoever points a model at
  another address has not agreed to show that address this key. Only a vendor that has no address of its own, or
  one on this machine, gets it wherever it is.
- Everything wrong in the table is found when it is read, not when a model is first called.
"""

import difflib
import ipaddress
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from types import MappingProxyType
from typing import Final, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec

from dualclaw_server.engine.model import ModelTraits
from dualclaw_server.models.anthropic.api import AnthropicApi
from dualclaw_server.models.anthropic.dialect import AnthropicDialect
from dualclaw_server.models.api import Api
from dualclaw_server.models.chat.api import ChatApi
from dualclaw_server.models.chat.dialect import ChatDialect
from dualclaw_server.models.endpoint import Endpoint, ModelTimeouts
from dualclaw_server.models.http_model import HttpChatModel
from dualclaw_server.models.responses.api import ResponsesApi
from dualclaw_server.models.responses.dialect import ResponsesDialect

Value = TypeVar("Value", ModelTraits, ChatDialect, ResponsesDialect, AnthropicDialect)


SMALLEST_WINDOW: Final = 1_024
"""A context window below this is a slip of the pen."""


class ModelRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What some models of a vendor have different."""

    match: tuple[str, ...]
    """Patterns of names, as in a shell, in lower case."""
    traits: dict[str, object] = {}
    """Fields of ModelTraits."""
    dialect: dict[str, object] = {}
    """Fields of the dialect."""


class Vendor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the table."""

    name: str
    """What a setting calls it."""
    title: str
    """What people call it."""
    api: Literal["chat", "responses", "anthropic"]
    """The wire API it speaks."""
    base_url: str
    """Its address; empty: it must be told."""
    keys: tuple[str, ...]
    """Variables that usually hold its key; the first that is set counts."""
    key_needed: bool = True
    """Without a key its own address answers nothing."""
    aliases: tuple[str, ...] = ()
    """Other names a setting may use."""
    path_if_bare: str = ""
    """Path for an address that was told without one."""
    path_if_versioned: str = ""
    """The same, when the address has ``api-version`` in its query; ``{model}`` stands for the model's name."""
    dialect: dict[str, object] = {}
    """Fields of the API's dialect: ChatDialect, ResponsesDialect or AnthropicDialect."""
    traits: dict[str, object] = {}
    """Fields of ModelTraits."""
    models: tuple[ModelRow, ...] = ()
    """What some of its models have different."""

    @property
    def host(self) -> str:
        """Host of its own address; empty when it has none."""
        return urlsplit(self.base_url).hostname or ""

    @property
    def shows_key_anywhere(self) -> bool:
        """Its own variable may be sent to any address: there is no host it belongs to."""
        return not self.host or _is_local(self.host)

    def traits_of(self, model: str) -> ModelTraits:
        """Return what a model can do, as far as the table knows."""
        return _checked(ModelTraits, {**self.traits, **self._row(model).traits}, self.name)

    def api_of(self, model: str) -> Api:
        """Return the wire API as this vendor speaks it with a model."""
        dialect = {**self.dialect, **self._row(model).dialect}
        match self.api:
            case "chat":
                return ChatApi(_checked(ChatDialect, dialect, self.name))
            case "anthropic":
                return AnthropicApi(_checked(AnthropicDialect, dialect, self.name))
            case "responses":
                return ResponsesApi(_checked(ResponsesDialect, dialect, self.name))

    def address(self, model: str, base_url: str) -> str:
        """Return the address to use.

        Args:
            model: the model's name.
            base_url: what the settings say; empty: its own.

        Raises:
            ValueError: there is none.
        """
        address = base_url.strip() or self.base_url
        if not address:
            raise ValueError(
                f"vendor {self.name} has no address of its own: set DUALCLAW_MODEL_BASE_URL, "
                f"or write {self.name}:{model}@https://..."
            )
        try:
            parts = urlsplit(address)
        except ValueError:
            raise ValueError("the base URL is no URL") from None
        if parts.path.strip("/"):
            return address
        versioned = self.path_if_versioned and "api-version=" in parts.query
        path = self.path_if_versioned.format(model=model) if versioned else self.path_if_bare
        return urlunsplit(parts._replace(path=path or parts.path))

    def key_for(self, address: str, key: str | None, environment: Mapping[str, str]) -> str:
        """Return the key to send to an address, or empty.

        Args:
            address: where it would go.
            key: what the settings say; empty: nothing, so a variable of the vendor's may count. None: the setting
                is meant for another vendor.
            environment: values of the variables there are.

        Raises:
            ValueError: this address wants a key and there is none.
        """
        if key:
            return key
        there, here = urlsplit(address), urlsplit(self.base_url)
        own = (there.scheme, there.hostname) == (here.scheme, here.hostname)
        if own or self.shows_key_anywhere:
            found = next((value for name in self.keys if (value := environment.get(name, "").strip())), "")
            if found:
                return found
        if self.key_needed and (own or not self.host):
            names = (*(() if key is None else ("DUALCLAW_MODEL_API_KEY",)), *self.keys)
            raise ValueError(f"vendor {self.name} needs a key: set {' or '.join(names)}")
        return ""

    def make_model(
        self,
        model: str,
        *,
        base_url: str = "",
        key: str | None = "",
        environment: Mapping[str, str] = MappingProxyType({}),
        timeouts: ModelTimeouts | None = None,
        headers: Mapping[str, str] | None = None,
        context_window: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> HttpChatModel:
        """Return a model of this vendor.

        Args:
            model: the model's name at the vendor.
            base_url: address; empty: the vendor's own.
            key: its key; empty or None: that of the vendor's variable, if it may be sent there.
            environment: values of the vendors' variables.
            timeouts: bounds of the waits.
            headers: sent in addition.
            context_window: tokens; None: what the table says.
            tls: settings of TLS, to be shared by models; None: those of the environment.

        Raises:
            ValueError: name, address, key or a header is missing or cannot be used.
        """
        address = self.address(model, base_url)
        api = self.api_of(model)
        traits = self.traits_of(model)
        if context_window is not None:
            traits = replace(traits, context_window=context_window)
        endpoint = Endpoint(
            address,
            api.path,
            self.key_for(address, key, environment),
            timeouts=timeouts or ModelTimeouts(),
            auth=api.headers,
            headers=headers,
            tls=tls,
        )
        return HttpChatModel(model, endpoint, api, traits=traits)

    def _row(self, model: str) -> ModelRow:
        name = model.lower()
        fitting = (row for row in self.models if any(fnmatchcase(name, pattern) for pattern in row.match))
        return next(fitting, ModelRow(()))


def shipped_vendors() -> Mapping[str, Vendor]:
    """Return the vendors this package knows, by name and alias."""
    return read_vendors((files(__package__) / "vendors.json").read_text("utf-8"))


def read_vendors(text: str) -> Mapping[str, Vendor]:
    """Return the vendors of a table, by name and alias.

    Args:
        text: JSON object of vendors by name. ``like`` takes over what another vendor of the table says, except
            for its aliases; the fields of a dialect are taken over one by one.

    Raises:
        ValueError: naming the vendor and what is wrong with it.
    """
    try:
        rows = msgspec.json.decode(text, type=dict[str, dict[str, object]])
    except msgspec.MsgspecError as error:
        raise ValueError(f"the table of vendors is no object of objects: {error}") from None
    vendors: dict[str, Vendor] = {}
    for name in rows:
        try:
            vendor = msgspec.convert({**_whole_row(rows, name), "name": name}, Vendor)
        except msgspec.ValidationError as error:
            raise ValueError(f"vendor {name}: {error}") from None
        for problem in _problems(vendor):
            raise ValueError(f"vendor {name}: {problem}")
        for each in (name, *vendor.aliases):
            if each in vendors:
                raise ValueError(f"vendor {name}: the name {each} is taken by {vendors[each].name}")
            vendors[each] = vendor
    return MappingProxyType(vendors)


def find_vendor(vendors: Mapping[str, Vendor], name: str) -> Vendor:
    """Return a vendor by name or alias.

    Raises:
        ValueError: naming the nearest, and all there are.
    """
    if name in vendors:
        return vendors[name]
    near = difflib.get_close_matches(name, list(vendors), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    names = ", ".join(each for each, vendor in vendors.items() if each == vendor.name)
    raise ValueError(f"vendor {name!r} is not known; {hint}There are: {names}")


def _whole_row(rows: Mapping[str, Mapping[str, object]], name: str) -> dict[str, object]:
    row = dict(rows[name])
    like = row.pop("like", None)
    if like is None:
        return row
    if not isinstance(like, str) or like not in rows or "like" in rows[like]:
        raise ValueError(f"vendor {name}: like must name a vendor of the table that is not like another")
    taken = {field: value for field, value in rows[like].items() if field != "aliases"}
    dialects = [each for each in (taken.get("dialect"), row.get("dialect")) if isinstance(each, dict)]
    return {**taken, **row, "dialect": {field: value for each in dialects for field, value in each.items()}}


def _problems(vendor: Vendor) -> Iterator[str]:
    parts = urlsplit(vendor.base_url)
    if vendor.base_url and not (parts.scheme == "https" or (parts.scheme == "http" and _is_local(vendor.host))):
        yield "base_url must be https, or http on this machine"
    if any(not name.endswith("_API_KEY") for name in vendor.keys):
        yield "keys must end in _API_KEY: the settings look at no other names"
    if vendor.key_needed and not vendor.keys:
        yield "a vendor that needs a key must say which variable holds it"
    for row in (ModelRow(("*",)), *vendor.models):
        if not row.match or any(pattern != pattern.lower() for pattern in row.match):
            yield "match must have patterns in lower case"
        try:
            traits = _checked(ModelTraits, {**vendor.traits, **row.traits}, "traits")
            can_continue = _can_continue(vendor, row)
        except ValueError as error:
            yield str(error)
            continue
        if traits.continues and not can_continue:
            yield "a model that continues needs an API, and a dialect with prefill, that can"
        if traits.context_window < SMALLEST_WINDOW:
            yield f"context_window must be at least {SMALLEST_WINDOW} tokens"


def _can_continue(vendor: Vendor, row: ModelRow) -> bool:
    """Tell whether requests can carry the beginning of an answer. Raises ValueError: the dialect is wrong."""
    dialect = {**vendor.dialect, **row.dialect}
    match vendor.api:
        case "chat":
            return _checked(ChatDialect, dialect, "dialect").prefill is not None
        case "responses":
            _checked(ResponsesDialect, dialect, "dialect")
            return False
        case "anthropic":
            AnthropicApi(_checked(AnthropicDialect, dialect, "dialect"))
            return True


def _checked(kind: type[Value], values: Mapping[str, object], where: str) -> Value:
    unknown = set(values) - {field.name for field in fields(kind)}
    if unknown:
        raise ValueError(f"{where}: {kind.__name__} has no {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

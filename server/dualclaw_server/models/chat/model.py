"""Chat Completions, the API of OpenAI that most vendors and local servers speak: streaming and not, any base URL.

How it speaks is in ``chat.api``, the driver in ``http_model``.
"""

import ssl
from collections.abc import Mapping

from dualclaw_server.engine.model import ModelTraits
from dualclaw_server.models.chat.api import ChatApi
from dualclaw_server.models.chat.dialect import ChatDialect, dialect_of
from dualclaw_server.models.endpoint import Endpoint, ModelTimeouts
from dualclaw_server.models.http_model import HttpChatModel
from dualclaw_server.models.sse import DEFAULT_MAX_EVENT_BYTES

DEFAULT_BASE_URL = "https://api.openai.com/v1"


class OpenAIChatModel(HttpChatModel):
    """A model behind a Chat Completions endpoint.

    Args:
        name: the model's name at the vendor.
        base_url: address of the API, usually ending in ``/v1``.
        api_key: the key; empty: none is sent (local servers).
        timeouts: bounds of all waits.
        headers: sent in addition.
        tls: settings of TLS, to be shared by models; None: those of the environment (``SSL_CERT_FILE``).
        max_event_bytes: bound of one event of a stream.
        dialect: what the vendor varies; None: OpenAI's own at OpenAI's and Azure's hosts, else the one most take.
        traits: what the model can do; None: the defaults, and it continues where the dialect can.

    Raises:
        ValueError: name, base URL, key or a header cannot be used.
    """

    def __init__(
        self,
        name: str,
        base_url: str = DEFAULT_BASE_URL,
        api_key: str = "",
        *,
        timeouts: ModelTimeouts | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES,
        dialect: ChatDialect | None = None,
        traits: ModelTraits | None = None,
    ) -> None:
        api = ChatApi(dialect or dialect_of(base_url))
        endpoint = Endpoint(
            base_url,
            api.path,
            api_key,
            timeouts=timeouts or ModelTimeouts(),
            auth=api.headers,
            headers=headers,
            tls=tls,
        )
        traits = traits or ModelTraits(continues=api.dialect.prefill is not None)
        super().__init__(name, endpoint, api, traits=traits, max_event_bytes=max_event_bytes)

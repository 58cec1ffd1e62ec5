"""Models behind an endpoint of OpenAI's Responses API.

How it speaks is in ``responses.api``, the driver in ``http_model``.
"""

import ssl
from collections.abc import Mapping

from dualclaw_server.engine.model import ModelTraits
from dualclaw_server.models.chat.model import DEFAULT_BASE_URL
from dualclaw_server.models.endpoint import Endpoint, ModelTimeouts
from dualclaw_server.models.http_model import HttpChatModel
from dualclaw_server.models.responses.api import ResponsesApi
from dualclaw_server.models.responses.dialect import ResponsesDialect
from dualclaw_server.models.sse import DEFAULT_MAX_EVENT_BYTES


class ResponsesModel(HttpChatModel):
    """A model behind a Responses endpoint.

    Args:
        name: the model's name at the vendor.
        base_url: address of the API, usually ending in ``/v1``.
        api_key: the key; empty: none is sent.
        timeouts: bounds of all waits.
        headers: sent in addition.
        tls: settings of TLS, to be shared by models; None: those of the environment (``SSL_CERT_FILE``).
        max_event_bytes: bound of one event of a stream.
        dialect: what the vendor varies; None: OpenAI's own.
        traits: what the model can do; None: the defaults. It never continues.

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
        dialect: ResponsesDialect | None = None,
        traits: ModelTraits | None = None,
    ) -> None:
        api = ResponsesApi(dialect)
        endpoint = Endpoint(
            base_url,
            api.path,
            api_key,
            timeouts=timeouts or ModelTimeouts(),
            auth=api.headers,
            headers=headers,
            tls=tls,
        )
        super().__init__(name, endpoint, api, traits=traits, max_event_bytes=max_event_bytes)

"""What speakers of the Anthropic Messages API vary, as plain data: the table of vendors is made of these."""

from dataclasses import dataclass
from typing import Literal

KeyHeader = Literal["x-api-key", "authorization"]
"""Where the key goes: as it is into ``x-api-key``, or as a bearer token (gateways, clouds)."""

SchemaForm = Literal["format", "tool"]
"""How a response schema is asked for: as the format of the text, or as the arguments of a tool that must be called."""


@dataclass(frozen=True, slots=True)
class AnthropicDialect:
    """One vendor's way of speaking the Messages API. The defaults fit Anthropic's own and most gateways."""

    path: str = "/messages"
    """What is appended to the base URL; ":streamRawPredict" at Vertex, whose base URL ends with the model's name."""
    key_header: KeyHeader = "x-api-key"
    """Where the key goes."""
    version: str = "2023-06-01"
    """Header ``anthropic-version``; empty: none. Later versions refuse temperature and top_p: see ``sampling``."""
    body_version: str = ""
    """``anthropic_version`` of the body, such as "vertex-2023-10-16"; with it the body names no model."""
    betas: tuple[str, ...] = ()
    """Names for the header ``anthropic-beta``."""
    max_tokens: int = 16_384
    """Bound of an answer when the caller sets none: the API demands one."""
    thinking: str = ""
    """The request's ``thinking`` as JSON text, such as ``{"type":"adaptive","display":"summarized"}``; empty: none.

    Newer models refuse earlier thinking with a 400 once anything before it has changed: tools, instructions, a
    message that was left out. Here these may change from run to run, so such a model wants
    ``"block_binding":{"prefix_mismatch_behavior":"drop_block"}`` in it, and the beta that goes with it.
    """
    sampling: bool = True
    """False: the model refuses temperature and top_p (Claude 4.7 and later); they are left out."""
    forced_tools: bool = True
    """False: the model cannot be made to call a tool; such a demand becomes "auto"."""
    schema_form: SchemaForm = "format"
    """How a response schema is asked for; "tool" for models before Claude 4.5 and for gateways without the format."""
    unsigned_thinking: bool = False
    """True: thinking without a signature goes back too. Other vendors of this API want it; Anthropic refuses it."""
    cache: bool = False
    """True: prompt caching is asked for, up to the end of the conversation. Writing costs a quarter more than plain
    input, reading a tenth of it, so it pays from the second call on.
    """


DEFAULT_DIALECT = AnthropicDialect()

"""Models: what answers. Each is an ``engine.model.ChatModel``; ``model_from_spec`` makes one from a setting."""

from collections.abc import Mapping

from dualclaw_server.engine.model import ChatModel
from dualclaw_server.models.endpoint import ModelTimeouts
from dualclaw_server.models.openai import DEFAULT_BASE_URL, OpenAIChatModel
from dualclaw_server.models.scripted import ScriptedModel, ScriptError

__all__ = ["ModelTimeouts", "OpenAIChatModel", "ScriptError", "ScriptedModel", "model_from_spec"]

_FORMS = "openai:NAME, scripted:FILE, scripted"


def model_from_spec(
    spec: str,
    *,
    base_url: str = "",
    api_key: str = "",
    timeouts: ModelTimeouts | None = None,
    headers: Mapping[str, str] | None = None,
) -> ChatModel:
    """Return the model that a setting names.

    Args:
        spec: ``openai:NAME`` (any Chat Completions endpoint), ``scripted:FILE``, or ``scripted`` for the script
            of the demo agent.
        base_url: the endpoint's address; empty: OpenAI's own.
        api_key: its key; empty: none is sent.
        timeouts: bounds of the waits.
        headers: sent in addition.

    Raises:
        ValueError: the form is unknown, the name is missing, the address or the script is wrong.
    """
    kind, _, rest = spec.strip().partition(":")
    match kind:
        case "scripted":
            return ScriptedModel.load(rest) if rest else ScriptedModel.shipped()
        case "openai" if rest:
            return OpenAIChatModel(rest, base_url or DEFAULT_BASE_URL, api_key, timeouts=timeouts, headers=headers)
    raise ValueError(f"model {spec!r} is not known; a model is one of {_FORMS}")

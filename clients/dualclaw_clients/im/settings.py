"""Settings of the IM claw's connectors: which there are, and what each needs.

They extend the clients' settings, are read in the same way and at the same moment, and say every problem at once.
What only one connector needs is asked for only if it is named in DUALCLAW_IM_CONNECTORS.
"""

from collections.abc import Sequence
from typing import Annotated, Final, Literal, get_args

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from dualclaw_clients.adapters.questions import Locale
from dualclaw_clients.settings import ImSettings, Listen, SettingsError

ConnectorName = Literal["console", "webhook"]
SHORTEST_SECRET: Final = 16
_LISTS = ("im_connectors", "im_webhook_reply_hosts", "im_webhook_approvers")


class RelaySettings(ImSettings):
    """Settings of ``dualclaw-im`` with all its connectors."""

    im_connectors: Annotated[tuple[ConnectorName, ...], NoDecode] = ()
    """The connectors to run, with commas between them: console, webhook."""
    im_language: Locale = "zh"
    """Language of the claw's own words: zh or en."""
    im_after_send: Literal["resend", "mark"] = "resend"
    """What becomes of a part of which nobody knows whether it arrived (unknown_after_send), when its message is taken
    up again: resend sends it once more under the same key, mark sends a line that says it may be missing."""
    im_webhook_listen: Listen = "127.0.0.1:8090"
    """Where messages are taken: POST /webhook/NAME."""
    im_webhook_name: str = Field(default="bot", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """NAME of the bot in the webhook's address; part of every stored key."""
    im_webhook_secrets: SecretStr = SecretStr("")
    """Secrets that sign messages and replies, with commas between them, each of 16 characters or more. All are taken,
    the first signs; to change one, put the new one first and take the old one away later."""
    im_webhook_reply_url: str = ""
    """Where replies are POSTed: https, or http on this machine."""
    im_webhook_reply_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Hosts that replies may go to, with commas between them; empty: that of the address."""
    im_webhook_tenant: str = Field(default="", pattern=r"^[!-~]{0,128}$")
    """Tenant of its messages; the claw's key then needs the role service. Empty: that of the key."""
    im_webhook_approvers: Annotated[tuple[str, ...], NoDecode] = ()
    """Ids of the users who may approve, with commas between them; * for everybody; empty: nobody."""
    im_webhook_limit: int = Field(default=4000, ge=64, le=1_000_000)
    """Longest text of one reply, in characters; longer answers are split."""
    im_webhook_max_body: int = Field(default=1024 * 1024, ge=1024)
    """Longest body of a message in bytes."""
    im_webhook_window: int = Field(default=300, ge=1, le=3600)
    """Seconds a message's timestamp may be off."""

    @model_validator(mode="before")
    @classmethod
    def _split_lists(cls, values: dict[str, object]) -> dict[str, object]:
        given = {name: value for name in _LISTS if isinstance(value := values.get(name), str)}
        return {**values, **{name: tuple(_parts(value)) for name, value in given.items()}}

    @field_validator("im_connectors")
    @classmethod
    def _each_once(cls, value: tuple[ConnectorName, ...]) -> tuple[ConnectorName, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names a connector twice")
        return value

    def webhook_secrets(self) -> tuple[str, ...]:
        """Return the webhook's secrets, the one that signs first."""
        return tuple(_parts(self.im_webhook_secrets.get_secret_value()))

    def check_service(self) -> None:
        """Check that what the named connectors need is there.

        Raises:
            SettingsError: a line for each that is not.
        """
        problems = []
        if not self.im_connectors:
            known = ", ".join(get_args(ConnectorName))
            problems.append(f"DUALCLAW_IM_CONNECTORS: names no connector; there are {known}")
        if set(self.im_connectors) - {"console"} and not self.im_state:
            problems.append(
                "DUALCLAW_IM_STATE: is needed: the path of a file that remembers which messages have been answered"
            )
        if "webhook" in self.im_connectors:
            problems += self._webhook_problems()
        if problems:
            raise SettingsError(problems)

    def _webhook_problems(self) -> Sequence[str]:
        problems = []
        secrets = self.webhook_secrets()
        if not secrets or min(map(len, secrets)) < SHORTEST_SECRET:
            problems.append(
                f"DUALCLAW_IM_WEBHOOK_SECRETS: give at least one secret, each of {SHORTEST_SECRET} characters or more"
            )
        from dualclaw_clients.im.webhook_reply import check_reply_url  # noqa: PLC0415  # httpx is slow to import

        try:
            check_reply_url(self.im_webhook_reply_url, self.im_webhook_reply_hosts)
        except ValueError as error:
            problems.append(f"DUALCLAW_IM_WEBHOOK_REPLY_URL: {error}")
        return problems


def _parts(value: str) -> list[str]:
    return [part for item in value.split(",") if (part := item.strip())]

"""Who answers a message: the engine, or the service the bots had before. For moving over tenant by tenant.

``IM_USE_ENGINE_CORE``: off (default), on, or a list of tenants. What the gate does not let through goes to
``IM_LEGACY_URL`` (``legacy.LegacyClient``).

Exception
  GateError     the settings leave messages without anybody to answer them; found at start
  LegacyError   the old service did not answer as agreed
"""

from dataclasses import dataclass
from typing import Self

_ON = frozenset({"on", "true", "yes", "1", "all"})
_OFF = frozenset({"", "off", "false", "no", "0", "none"})


class GateError(Exception):
    """The settings leave messages without anybody to answer them."""


class LegacyError(Exception):
    """The old service did not answer as agreed; the text is for people and has no address in it."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Which tenants the engine answers."""

    everyone: bool = False
    tenants: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, value: str) -> Self:
        """Read IM_USE_ENGINE_CORE: off, on, or tenants separated by commas.

        Raises:
            GateError: on or off stands among tenants.
        """
        word = value.strip()
        if word.lower() in _OFF:
            return cls()
        if word.lower() in _ON:
            return cls(everyone=True)
        tenants = frozenset(name.strip() for name in word.split(",") if name.strip())
        switches = sorted(name for name in tenants if name.lower() in _ON | _OFF)
        if switches or not tenants:
            raise GateError(f"IM_USE_ENGINE_CORE={value}: give on, off, or a list of tenants, not a mixture")
        return cls(tenants=tenants)

    def lets_through(self, tenant: str) -> bool:
        """Return whether the engine answers this tenant."""
        return self.everyone or tenant in self.tenants

    def require_legacy(self, legacy_url: str) -> None:
        """Check that whoever is not let through has somebody to answer.

        Raises:
            GateError: nobody; says both ways out.
        """
        if self.everyone or legacy_url.strip():
            return
        whom = "off" if not self.tenants else "on for " + ", ".join(sorted(self.tenants)) + " only"
        raise GateError(
            f"IM_USE_ENGINE_CORE is {whom}, and no IM_LEGACY_URL says who answers the others. "
            "Either set IM_USE_ENGINE_CORE=on, so that the engine answers everybody, "
            "or set IM_LEGACY_URL to the service that answered until now."
        )

"""Made-up credentials of the right shape, put together here so that no scanner takes the repository for leaky."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Credential:
    """One credential and where it stands."""

    kind: str
    before: str
    secret: str
    after: str
    border: bool
    """True: it is only known after something that is no letter or digit."""

    @property
    def text(self) -> str:
        """It in its place."""
        return f"{self.before}{self.secret}{self.after}"

    def left_in(self, text: str) -> str:
        """Return a piece of it, of 8 characters, that can be read in a text; "": none can."""
        text = re.sub(r"\[masked:[a-z0-9-]+\]", "\0", text)
        pieces = (self.secret[i : i + 8] for i in range(len(self.secret) - 7))
        return next((piece for piece in pieces if piece in text), "")


def load_credentials() -> list[Credential]:
    """Return every credential of the corpus."""
    made = []
    for item in json.loads((HERE / "credentials.json").read_text("utf-8")):
        before, secret, after = ("".join(item[name]) for name in ("before", "secret", "after"))
        made.append(Credential(item["kind"], before, secret, after, item["border"]))
    return made


def load_ordinary() -> list[str]:
    """Return texts without a credential."""
    return list(json.loads((HERE / "ordinary.json").read_text("utf-8")))

"""How an agent stops without having ended: it waits for people, or another agent takes over."""

from dualclaw_server.engine.outcome import Outcome


class Parked(Outcome):
    """People are asked; the questions are in the checkpoint."""


class Transferred(Outcome):
    """Another agent takes over the conversation."""

    def __init__(self, agent: str) -> None:
        super().__init__(agent)
        self.agent = agent

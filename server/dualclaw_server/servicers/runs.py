"""What the rpcs ask of the engine; implemented by ``engine.runner.Runner``."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dualclaw import Agent, InterceptorInfo, ResumeRequest, Run, RunRequest
from dualclaw_server.engine.caller import Caller, TraceParent
from dualclaw_server.engine.store import Created, RunKey, RunStore


class Runs(Protocol):
    """Starts and cancels runs. Methods raise EngineError for what a caller did wrong, StoreError for the store."""

    @property
    def store(self) -> RunStore:
        """Where runs and conversations live; reads go there directly."""

    async def start(
        self, caller: Caller, request: RunRequest, trace: TraceParent, *, may_answer: bool = True
    ) -> Created:
        """Store a new run, or find the one its request_id already made. OVERLOADED once the engine drains."""

    async def cancel(self, caller: Caller, run_id: str, reason: str, trace: TraceParent) -> Run:
        """Ask a run to end and return it as it is then."""

    def attached(self, key: RunKey, *, starter: RunRequest | None = None) -> AbstractContextManager[None]:
        """Count as a reader of the run while the context lasts; ``starter`` is the request of who started it."""

    async def resume(self, caller: Caller, request: ResumeRequest, trace: TraceParent) -> Created:
        """Store answers to a run that asked and have it go on; the same request_id finds the segment it had begun."""

    async def agents_info(self, caller: Caller) -> Sequence[Agent]:
        """Return the public records of all agents as they are for the caller's tenant, the default agent first."""

    async def set_interceptor_enabled(
        self, caller: Caller, agent_name: str, name: str, *, enabled: bool
    ) -> InterceptorInfo:
        """Switch an interceptor of an agent for the caller's tenant."""

"""What the operating system says: the CPU a process has used, its memory, and who else was at work.

CPU is read from the clock that Linux keeps for every process: the run time of all its threads, those that ended
included, in nanoseconds. It is the counter behind ``/proc/PID/task/*/schedstat``, which forgets a thread when it ends.
"""

import contextlib
import os
import platform
import resource
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

OTHERS = 0.10
"""Share of the machine that other programs may use before figures count as noisy."""
STOLEN = 0.02
"""Share of the machine that its host may take away."""

_PROCESS_CLOCK = 2
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used. Raises OSError when it is gone."""
    return time.clock_gettime_ns((~pid << 3) | _PROCESS_CLOCK) / 1e9


def memory_bytes(pid: int) -> int:
    """Return the memory of a process; pages it shares with others count in part (PSS)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no Pss in /proc/{pid}/smaps_rollup")


@dataclass(frozen=True)
class Noise:
    """Who else used the machine while something was measured, as shares of all its cores."""

    others: float
    stolen: float

    @property
    def quiet(self) -> bool:
        """True when figures taken meanwhile may be quoted."""
        return self.others <= OTHERS and self.stolen <= STOLEN

    def __str__(self) -> str:
        return f"{self.others:.0%} other programs, {self.stolen:.0%} stolen"


@dataclass(frozen=True)
class Watch:
    """The machine's counters at one moment, with those of our own processes."""

    busy: float
    stolen: float
    whole: float
    own: Mapping[int, float]

    @classmethod
    def now(cls, pids: Iterable[int]) -> "Watch":
        """Read the counters; ``pids`` are the processes at work for the benchmark; those that ended are known."""
        fields = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:]
        user, nice, system, idle, wait, hard, soft, stolen = (int(field) / _TICKS for field in fields[:8])
        busy = user + nice + system + hard + soft
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = {os.getpid(): time.process_time() + ended.ru_utime + ended.ru_stime}
        for pid in pids:
            with contextlib.suppress(OSError):  # it has just ended
                own[pid] = cpu_seconds(pid)
        return cls(busy, stolen, busy + idle + wait + stolen, own)

    def until(self, later: "Watch") -> Noise:
        """Return who else was at work between this moment and a later one."""
        whole = max(later.whole - self.whole, 1e-9)
        own = sum(spent - self.own.get(pid, 0.0) for pid, spent in later.own.items())
        others = max(0.0, later.busy - self.busy - own)
        return Noise(others / whole, max(0.0, later.stolen - self.stolen) / whole)


def describe() -> dict[str, str]:
    """Return what the figures were taken on."""
    return {"cpu": _processor(), "cores": str(os.cpu_count()), "kernel": platform.release(),
            "python": platform.python_version()}  # fmt: skip


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()

"""The Dockerfile without Docker: its steps run in an empty folder that stands for the image's root.

What this shows: every file a step copies is there, every RUN ends well with nothing but what the steps before it
made, nothing stays root's that the service must write, and the health checks tell a service that answers from one
that does not. What it cannot show: that the base image has what its name says.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.nats_servers import free_port

from .conftest import ROOT

DOCKERFILE = ROOT / "Dockerfile"
PLACES = ("/opt/dualclaw", "/src", "/var/lib/dualclaw")
"""Folders of the image that steps name."""
TARGETS = ("server", "web", "im")


@dataclass(slots=True)
class Image:
    """What the steps have made: a folder, and what is set for those that follow."""

    root: Path
    environment: dict[str, str]
    workdir: str = "/"
    user: str = "root"
    entry: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def here(self, text: str) -> str:
        """Return a text with the image's folders as they are on this machine."""
        for place in PLACES:
            text = re.sub(rf"(?<![\w./-]){place}(?![\w-])", f"{self.root}{place}", text)
        return text

    def copy(self) -> "Image":
        """The same folder, for a target that goes on from it."""
        return Image(self.root, dict(self.environment), self.workdir, self.user, [*self.entry], [*self.health])


def steps() -> Iterator[tuple[str, str]]:
    """Yield instruction and rest of every step, lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()))
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        yield word, rest.strip()


def build(root: Path, **arguments: str) -> dict[str, Image]:
    """Do every step; returns the images by target."""
    bin_folder = root / "usr/bin"
    bin_folder.mkdir(parents=True)
    base = getattr(sys, "_base_executable", sys.executable)
    (bin_folder / "python").symlink_to(base)
    keep = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTPS_", "HOME"))}
    path = f"{bin_folder}:{os.environ['PATH']}"
    made: dict[str, Image] = {}
    image = Image(root, {})
    for word, rest in steps():
        match word:
            case "FROM":
                source, _, name = rest.partition(" AS ")
                image = made[source].copy() if source in made else Image(root, {**keep, "PATH": path})
                made[name] = image
            case "ENV":
                for setting in rest.split():
                    name, _, value = setting.partition("=")
                    image.environment[name] = image.here(value).replace("$PATH", image.environment["PATH"])
            case "ARG":
                name, _, default = rest.partition("=")
                image.environment[name] = arguments.get(name, default)
            case "WORKDIR":
                image.workdir = image.here(rest)
                Path(image.workdir).mkdir(parents=True, exist_ok=True)
            case "COPY":
                copy(image, rest.split())
            case "RUN":
                run(image, rest)
            case "USER":
                image.user = rest
            case "HEALTHCHECK":
                image.health = json.loads(rest[rest.index("CMD") + 3 :])
            case "ENTRYPOINT":
                image.entry = json.loads(rest)
            case "EXPOSE" | "VOLUME":
                pass
            case _:
                pytest.fail(f"a step this test does not know: {word} {rest}")
    return made


def copy(image: Image, paths: list[str]) -> None:
    """Copy what git has of these, as a build from a clean checkout would."""
    *sources, target = paths
    goal = Path(image.here(target)) if target.startswith("/") else Path(image.workdir, target)
    for source in sources:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z", source], cwd=ROOT, capture_output=True, check=True
        )
        files = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
        assert files, f"{source} is not in the repository"
        for name in files:
            place = goal / Path(name).relative_to(source) if name != source else goal / Path(name).name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, place)


def run(image: Image, command: str) -> None:
    """Run a step as the image's shell would; users are made inside the folder, never on this machine."""
    command = image.here(command)
    if "useradd" in command:
        etc = image.root / "etc"
        etc.mkdir()
        for name in ("passwd", "group", "shadow", "gshadow"):
            (etc / name).touch()
        command = command.replace("useradd", f"useradd --prefix {image.root}")
    if os.geteuid() != 0:
        command = re.sub(r"chown \d+", f"chown {os.geteuid()}", command)
        if "useradd" in command:
            return
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=image.workdir,
        env=image.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, f"RUN {command}\n{done.stdout}"


BUILD = "DUALCLAW_TEST_IMAGE"
"""Set it to build outside CI, too: a minute, and most of the packages from the index once more."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """The images of every target, the server's with the local model."""
    if not (os.environ.get(BUILD) or os.environ.get("REQUIRE_TOOLCHAINS")):
        pytest.skip(f"{BUILD} is not set, so the Dockerfile's steps were NOT run; CI does it always")
    return build(tmp_path_factory.mktemp("image"), LOCAL_MODEL="1")


async def check(image: Image, environment: Mapping[str, str], ports: Mapping[str, str]) -> int | None:
    """Run the health check; returns its exit code. ``ports``: what stands for the fixed ones."""
    command = image.health
    for fixed, free in ports.items():
        command = [part.replace(fixed, free) for part in command]
    child = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        cwd=image.workdir,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    return await asyncio.wait_for(child.wait(), 300)


async def started(image: Image, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start the entry point and wait until it says that it listens."""
    child = await asyncio.create_subprocess_exec(
        *image.entry,
        env=environment,
        cwd=image.workdir,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert child.stdout is not None
    line = (await asyncio.wait_for(child.stdout.readline(), 300)).decode()
    assert "listening on" in line, line
    return child


async def ended(child: asyncio.subprocess.Process) -> None:
    child.terminate()
    try:
        await asyncio.wait_for(child.communicate(), 100)
    except TimeoutError:
        child.kill()
        await child.wait()


def test_there_is_a_target_for_each_service_and_none_runs_as_root() -> None:
    """Users are numbers, which orchestrators can see to be none of root's; every service says how it is."""
    text = DOCKERFILE.read_text()
    parts = re.split(r"(?m)^FROM \S+ AS ", text)
    services = {part.split()[0]: part for part in parts[1:] if not part.startswith("base")}
    assert tuple(services) == TARGETS
    for part in services.values():
        assert re.findall(r"(?m)^USER (\S+)", part)[-1] == "10001"
        assert "HEALTHCHECK" in part
        assert "ENTRYPOINT" in part


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_every_step_runs_with_nothing_but_what_the_steps_before_it_made(images: dict[str, Image]) -> None:
    """The commands of all services are there, none from this checkout, and the state's folder is the user's."""
    root = images["base"].root
    for target in TARGETS:
        command = root / "opt/dualclaw/bin" / images[target].entry[0]
        assert command.is_file()
        done = subprocess.run(
            [command, "--help"], env=images[target].environment, cwd=root, capture_output=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr.decode()
    look = "import dualclaw_server.models.local.weights as w; print(w.__file__, w.find_weights())"
    python = [root / "opt/dualclaw/bin/python", "-c", look]
    found = subprocess.run(python, env=images["server"].environment, capture_output=True, check=True, timeout=300)
    assert all(path.startswith(str(root)) for path in found.stdout.decode().split())
    owner = (root / "var/lib/dualclaw").stat().st_uid
    assert owner == (10001 if os.geteuid() == 0 else os.geteuid())
    if os.geteuid() == 0:
        assert "dualclaw:x:10001:" in (root / "etc/passwd").read_text()


@pytest.mark.slow
@pytest.mark.timeout(2000)
async def test_health_checks_tell_a_service_that_answers_from_one_that_does_not(images: dict[str, Image]) -> None:
    """Each as the Dockerfile has it, for the services as they are installed there, with the settings of the image."""
    engine_port, web_port = str(free_port()), str(free_port())
    ports = {"50051": engine_port, "8080": web_port}
    server = images["server"].environment | {
        "DUALCLAW_LISTEN": f"0.0.0.0:{engine_port}",
        "DUALCLAW_ALLOW_ANONYMOUS": "1",
        "DUALCLAW_MODEL": "scripted",
    }
    web = images["web"].environment | {
        "DUALCLAW_WEB_LISTEN": f"127.0.0.1:{web_port}",
        "DUALCLAW_ENGINE": f"127.0.0.1:{engine_port}",
    }
    im = images["im"].environment | {"DUALCLAW_ENGINE": f"127.0.0.1:{engine_port}"}
    services = {"server": server, "web": web, "im": im}
    for name, environment in services.items():
        assert await check(images[name], environment, ports) != 0, name
    running = [await started(images["server"], server)]
    try:
        running.append(await started(images["web"], web))
        for name, environment in services.items():
            assert await check(images[name], environment, ports) == 0, name
    finally:
        for child in reversed(running):
            await ended(child)
    assert (images["server"].root / "var/lib/dualclaw/dualclaw.db").exists()

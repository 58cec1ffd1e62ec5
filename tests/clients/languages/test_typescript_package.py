"""The TypeScript client as a stranger gets it: the packed archive, unpacked into a project that is not ours."""

import json
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.toolchains import require

from .conftest import ROOT

pytestmark = pytest.mark.timeout(1500)

FOLDER = ROOT / "clients/typescript"
PROGRAM = """
import { EngineClient, EngineError, RunView, toWire, type ClientOptions, type Reconnect } from "dualclaw";
import { EngineEventSchema, RunRequestSchema, StopReason } from "dualclaw/v1";
import { create } from "@bufbuild/protobuf";

const reconnect: Partial<Reconnect> = { startMs: 0, totalMs: 5_000 };
const options: ClientOptions = { token: async () => "key", reconnect };
const client = new EngineClient("127.0.0.1:1", options);
const event = create(EngineEventSchema, { seq: 1, payload: { case: "delta", value: { content: "hi" } } });
const view = new RunView();
view.apply(event);
const wire: string | undefined = toWire(event);
try {
  const stream = await client.run(create(RunRequestSchema, { agent: "a" }), { signal: AbortSignal.timeout(20_000) });
  for await (const { payload } of stream) {
    if (payload.case === "done" && payload.value.stopReason === StopReason.FINISHED) break;
  }
} catch (error) {
  if (!(error instanceof EngineError) || !error.unreachable || !(error.cause instanceof Error)) throw error;
  console.log(wire, view.text);
}
client.close();
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the packed client among its packages; what that depends on is linked, so nothing is fetched."""
    npm = require("npm")
    folder = tmp_path_factory.mktemp("project")
    locked = FOLDER / "node_modules"
    if not (locked / ".package-lock.json").exists():
        command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, timeout=300)
    subprocess.run([npm, "run", "build"], cwd=FOLDER, check=True, capture_output=True, timeout=500)
    command = [npm, "pack", "--ignore-scripts", "--pack-destination", str(folder)]
    subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, timeout=300)
    packages = folder / "node_modules"
    for name in ("@bufbuild/protobuf", "@connectrpc/connect", "@connectrpc/connect-node", "@types/node"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).symlink_to(locked / name, target_is_directory=True)
    (packages / "undici-types").symlink_to(locked / "undici-types", target_is_directory=True)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(packages, filter="data")
    (packages / "package").rename(packages / "dualclaw")
    (folder / "package.json").write_text(json.dumps({"name": "stranger", "private": True, "type": "module"}))
    (folder / "main.ts").write_text(PROGRAM)
    return folder


@pytest.mark.parametrize(
    ("module", "resolution"), [("node16", "node16"), ("nodenext", "nodenext"), ("esnext", "bundler")]
)
def test_the_packed_client_compiles_under_strict_settings(project: Path, module: str, resolution: str) -> None:
    """Its types are whole under each way of resolving modules, declarations included, with no check skipped."""
    options = ["--strict", "--exactOptionalPropertyTypes", "--noUncheckedIndexedAccess", "--skipLibCheck", "false"]
    target = [
        "--target",
        "es2022",
        "--module",
        module,
        "--moduleResolution",
        resolution,
        "--outDir",
        f"out-{resolution}",
    ]
    command = [require("node"), str(FOLDER / "node_modules/typescript/bin/tsc"), *options, *target, "main.ts"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    ran = subprocess.run(
        [require("node"), f"out-{resolution}/main.js"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == '{"type": "delta", "content": "hi", "seq": 1} hi\n'


def test_the_packed_client_holds_what_its_users_need_and_nothing_else(project: Path) -> None:
    """Code and types, README and manifest: no tests, no sources, no maps; every export exists and no type is any."""
    package = project / "node_modules/dualclaw"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    assert all(re.fullmatch(r"README\.md|package\.json|dist/src/.*\.(js|d\.ts)", name) for name in files), files
    manifest = json.loads((package / "package.json").read_text())
    for entry in manifest["exports"].values():
        assert {name.removeprefix("./") for name in entry.values()} <= files
    assert {name for name in files if name.endswith(".js")} == {
        name.removesuffix(".d.ts") + ".js" for name in files if name.endswith(".d.ts")
    }
    for name in files:
        if name.endswith(".d.ts"):
            code = re.sub(r"/\*.*?\*/", "", (package / name).read_text(), flags=re.DOTALL)
            assert not re.search(r"[:<|,] *any\b", code), name


def test_the_lock_file_names_no_registry() -> None:
    """Whoever installs uses the registry of their own settings; the integrity hashes hold the packages."""
    lock = (FOLDER / "package-lock.json").read_text()
    assert "resolved" not in lock
    assert "://" not in lock
    packages = json.loads(lock)["packages"]
    assert all("integrity" in entry for name, entry in packages.items() if name)
    manifest = json.loads((FOLDER / "package.json").read_text())
    for key in ("version", "engines", "dependencies", "devDependencies"):
        assert packages[""][key] == manifest[key]

"""The Java client: its own tests against the vectors and a live engine."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from tests.toolchains import require

from .conftest import ROOT, LiveEngine

FOLDER = ROOT / "clients/java"


@pytest.mark.timeout(1500)
def test_java_client(live_engine: LiveEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """``mvn test`` passes, with every golden vector and every live test among what it ran, and none skipped."""
    require("java")
    for report in (FOLDER / "target/surefire-reports").glob("*.xml"):
        report.unlink()
    done = subprocess.run(
        [require("mvn"), "-B", "-q", "test"],
        cwd=FOLDER,
        env={**os.environ, **live_engine.environment},
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    reports = [ET.parse(path).getroot() for path in (FOLDER / "target/surefire-reports").glob("*.xml")]  # noqa: S314
    cases = [case for report in reports for case in report.iter("testcase")]
    vectors = sum(len(json.loads(path.read_text())) for path in (ROOT / "proto/vectors").glob("*.json"))
    read = [case for case in cases if case.get("classname") == "dev.dualclaw.VectorsTest"]
    live = [case for case in cases if case.get("classname") == "dev.dualclaw.LiveTest"]
    assert [case.get("name") for case in cases if case.find("skipped") is not None] == []
    assert len(read) > vectors
    assert len(live) >= 14
    with capsys.disabled():
        sys.stdout.write(f"\njava: {len(cases)} tests, {len(read)} of them golden vectors, {len(live)} live\n")

"""``dualclaw contract check``: what the protos of a folder would break against a baseline, and for whom.

Exit codes: 0 nothing breaks, 1 something does, 2 it could not be judged (no buf, no baseline, protos that do not
compile, a folder without vectors).
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TextIO

from dualclaw_clients.contract_check import vectors
from dualclaw_clients.contract_check.buf import BufError, breaking, build, find_buf
from dualclaw_clients.contract_check.findings import Finding
from dualclaw_clients.contract_check.rules import RULES, judge

KEPT, BROKEN, UNJUDGED = 0, 1, 2
_PLACES: Final = ("vectors", "proto/vectors")
"""Where a folder of protos has its vectors."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, and what could be looked at."""

    findings: tuple[Finding, ...]
    vectors: int
    """How many vectors of the baseline were held against the protos."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``contract check`` to a command line."""
    contract = commands.add_parser(
        "contract", help="Judge changes of the protos.", description="Judge changes of the protos."
    )
    check = contract.add_subparsers(dest="verb", required=True, metavar="VERB").add_parser(
        "check",
        help="say what the protos of a folder would break, and for whom",
        description="Say what the protos of a folder would break against a baseline, and for whom: buf breaking, the "
        "rules beyond it, and the golden vectors. Exit codes: 0 nothing breaks, 1 something does, 2 it could not be "
        "judged.",
        epilog="rules beyond buf:\n" + "\n".join(f"  {rule.id:22}{rule.text}" for rule in RULES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument(
        "--against", required=True, metavar="BASELINE",
        help="what is released: an image (.binpb), a folder of protos, or a git address such as .git#tag=v1.0.0",
    )  # fmt: skip
    check.add_argument("path", nargs="?", default=".", metavar="PATH", help="the folder of the protos (.)")
    check.add_argument(
        "--vectors", metavar="FOLDER",
        help="the baseline's golden vectors (those in the folder BASELINE; else those of PATH)",
    )  # fmt: skip
    check.add_argument("--json", action="store_true", help="one JSON object a line on stdout, the last one a summary")


def run(args: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Run the command and return its exit code."""
    try:
        verdict = check(args.path, args.against, args.vectors)
    except (BufError, vectors.VectorError) as error:
        err.write(f"dualclaw: contract check: {error}\n")
        return UNJUDGED
    lines = _json_lines(verdict) if args.json else _text_lines(verdict)
    out.writelines(f"{line}\n" for line in lines)
    return BROKEN if verdict.findings else KEPT


def check(path: str, against: str, vector_folder: str | None = None) -> Verdict:
    """Judge the protos of a folder. Raises BufError or VectorError when that cannot be done."""
    buf = find_buf()
    old, new = build(buf, against), build(buf, path)
    if not old.file_of:
        raise BufError(f"{against} holds no protos, so everything would pass")
    findings = [*breaking(buf, path, against), *judge(old, new)]
    folder, own = Path(vector_folder) if vector_folder else _vectors_of(against), _vectors_of(path)
    source = folder or own
    known = vectors.load(source) if source else {}
    findings += vectors.judge_schema(old, new, known)
    if folder and own and folder.resolve() != own.resolve():
        findings += vectors.judge_vectors(known, vectors.load(own))
    return Verdict(tuple(findings), len(known))


def _vectors_of(place: str) -> Path | None:
    found = (Path(place) / name for name in _PLACES)
    return next((folder for folder in found if folder.is_dir()), None)


def _text_lines(verdict: Verdict) -> Iterable[str]:
    for finding in verdict.findings:
        yield f"{finding.where}: {finding.what} [{finding.rule}]"
        yield f"    {finding.who}"
    count = len(verdict.findings)
    told = f"{count} thing{'s' if count != 1 else ''} would break" if count else "nothing breaks"
    looked = f"{verdict.vectors} vectors" if verdict.vectors else "no vectors, because none were found (--vectors)"
    yield f"{told}; judged by buf breaking, {len(RULES)} rules beyond it and {looked}"


def _json_lines(verdict: Verdict) -> Iterable[str]:
    for finding in verdict.findings:
        yield json.dumps(asdict(finding), ensure_ascii=False)
    yield json.dumps({"findings": len(verdict.findings), "rules": len(RULES), "vectors": verdict.vectors})

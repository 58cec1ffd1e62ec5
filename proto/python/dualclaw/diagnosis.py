"""A diagnosis: a finding that programs act on and people read, as message, dict and text."""

from __future__ import annotations  # ValueType exists for type checkers only

from collections.abc import Mapping
from typing import Literal

from dualclaw.json_text import clean_text
from dualclaw.v1.event_pb2 import Diagnosis, Severity

SeverityName = Literal["info", "warning", "error"]

SEVERITIES: Mapping[str, Severity.ValueType] = {
    "info": Severity.SEVERITY_INFO,
    "warning": Severity.SEVERITY_WARNING,
    "error": Severity.SEVERITY_ERROR,
}
_SEVERITY_NAMES: Mapping[int, str] = {number: name for name, number in SEVERITIES.items()}
_ICONS: Mapping[int, str] = {
    Severity.SEVERITY_INFO: "ℹ️",
    Severity.SEVERITY_WARNING: "⚠️",
    Severity.SEVERITY_ERROR: "❌",
}


def make_diagnosis(
    *, code: str, severity: str, summary: str, detail: str = "", hint: str = "", retryable: bool = False
) -> Diagnosis:
    """Return a diagnosis; ``severity`` is "info", "warning" or "error".

    Raises:
        ValueError: a value has the wrong type or the severity is unknown; the message says which.
    """
    if not isinstance(severity, str):
        raise ValueError(f"severity must be a str, not {type(severity).__name__}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity must be one of {', '.join(SEVERITIES)}, not {severity!r}")
    if not isinstance(retryable, bool):
        raise ValueError(f"retryable must be a bool, not {type(retryable).__name__}")
    texts = {"code": code, "summary": summary, "detail": detail, "hint": hint}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a str, not {type(value).__name__}")
    return Diagnosis(
        code=clean_text(code),
        severity=SEVERITIES[severity],
        summary=clean_text(summary),
        detail=clean_text(detail),
        hint=clean_text(hint),
        retryable=retryable,
    )


def diagnosis_to_dict(diagnosis: Diagnosis) -> dict[str, object]:
    """Return the six keys of a diagnosis, all always there; an unspecified or unknown severity is ""."""
    return {
        "code": diagnosis.code,
        "severity": _SEVERITY_NAMES.get(diagnosis.severity, ""),
        "summary": diagnosis.summary,
        "detail": diagnosis.detail,
        "hint": diagnosis.hint,
        "retryable": diagnosis.retryable,
    }


def diagnosis_from_dict(value: object) -> Diagnosis:
    """Return the diagnosis a dict stands for; never raises: unknown keys are ignored, wrong values empty."""
    if not isinstance(value, Mapping):
        return Diagnosis()

    def text(key: str) -> str:
        found = value.get(key)
        return clean_text(found) if isinstance(found, str) else ""

    return Diagnosis(
        code=text("code"),
        severity=SEVERITIES.get(text("severity"), Severity.SEVERITY_UNSPECIFIED),
        summary=text("summary"),
        detail=text("detail"),
        hint=text("hint"),
        retryable=value.get("retryable") is True,
    )


def diagnosis_text(diagnosis: Diagnosis | Mapping[str, object]) -> str:
    """Return a diagnosis for people: an icon and the summary, then detail and hint on lines of their own.

    A severity newer than this code shows as info, a missing summary as the code; "" when nothing is there.
    """
    found = diagnosis if isinstance(diagnosis, Diagnosis) else diagnosis_from_dict(diagnosis)
    if not has_content(found):
        return ""
    icon = _ICONS.get(found.severity, _ICONS[Severity.SEVERITY_INFO])
    lines = [f"{icon} {' '.join(found.summary.splitlines()) or found.code}".rstrip()]
    if found.detail:
        lines.append(found.detail)
    if found.hint:
        lines.append(f"建议：{found.hint}")
    return "\n".join(lines)


def has_content(diagnosis: Diagnosis) -> bool:
    """Whether anything of a diagnosis would show on the wire; only then is it written."""
    return any(diagnosis_to_dict(diagnosis).values())

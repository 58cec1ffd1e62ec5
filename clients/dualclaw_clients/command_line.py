"""What the command lines of the clients have in common: version, checked addresses, the list of settings."""

import argparse
import shutil
import textwrap
from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version

from pydantic import SecretStr

from dualclaw_clients.settings import ClientSettings, variables_of


def installed_version() -> str:
    """Return the version of dualclaw; "unknown" in a source tree that was never installed."""
    try:
        return version("dualclaw")
    except PackageNotFoundError:
        return "unknown"


def lacking(program: str, extra: str, error: ModuleNotFoundError) -> str:
    """Return what to tell whoever starts a program of an extra that is not installed."""
    package = (error.name or str(error)).partition(".")[0]
    return (
        f"{program}: the package {package} is not installed; it comes with the extra {extra}: "
        f"pip install 'dualclaw[{extra}]', in a checkout .venv/bin/pip install -e '.[{extra}]'"
    )


def checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """Return an argparse type from a check that raises ValueError, whose text argparse alone would not show."""

    def convert(text: str) -> str:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def settings_help(kind: type[ClientSettings], *, without: Collection[str] = ()) -> str:
    """Return the part of a ``--help`` that lists a program's variables, from the docstrings of their fields.

    ``without`` names fields that do not matter to the program.
    """
    rows = [
        (variable, f"{(field.description or '').replace('``', '')}{_default(field.default)}")
        for variable, (name, field) in zip(variables_of(kind), kind.model_fields.items(), strict=True)
        if name not in without
    ]
    indent = max(len(variable) for variable, _ in rows) + 4
    width = max(shutil.get_terminal_size().columns - 2, indent + 30)
    lines = [
        textwrap.fill(f"  {variable:{indent - 2}}{text}", width, subsequent_indent=" " * indent)
        for variable, text in rows
    ]
    return "\n".join(["environment:", *lines])


def _default(value: object) -> str:
    if isinstance(value, SecretStr) or value in ("", None, (), False):
        return ""
    return f" ({value})"

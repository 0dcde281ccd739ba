"""Which draft heads an engine has: the one the user names, those shipped for the model; and what they need of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from specdec.config import SpecConfig
from specdec.errors import ConfigError
from specdec.models.head_files import shipped_heads
from specdec.models.head_load import load_head
from specdec.spec.limits import uses

if TYPE_CHECKING:
    from specdec.models.draft_heads import DraftHead
    from specdec.models.load import LoadedModel
    from specdec.sequence import Sequence

METHODS = ("eagle3", "peagle")


def load_heads(config: SpecConfig, target: LoadedModel) -> dict[str, DraftHead]:
    """Heads by method. The named head first; "auto" adds the shipped ones that fit the target, a method takes its own.

    A named head of another target is kept, with a warning in the log: it takes part without drafting. Raises ConfigError
    where the method has no head, ModelNotFound and UnsupportedCheckpoint for a head that cannot be read.
    """
    if config.method not in ("auto", *METHODS):
        return {}
    heads: dict[str, DraftHead] = {}
    if config.head is not None:
        head = load_head(config.head, target, draft_quantization=config.draft_quantization)
        if config.method not in ("auto", head.config.kind):
            raise ConfigError(f"{config.head!r} is a head for {head.config.kind!r}, not for method {config.method!r}", param="head")
        if head.warning is not None:
            logging.getLogger("specdec").warning("%s", head.warning)
        heads[head.config.kind] = head
    for kind, path in shipped_heads(os.path.basename(os.path.normpath(target.name))).items():
        if kind in METHODS and kind not in heads and config.method in ("auto", kind):
            head = load_head(path, target, draft_quantization=config.draft_quantization)
            if head.trusted:
                heads[kind] = head
    if config.method in METHODS and config.method not in heads:
        raise ConfigError(
            f"speculation method {config.method!r} needs `head`: a directory or hub id; none is shipped for {target.name!r}", param="head"
        )
    return heads


def taps_of(heads: Iterable[DraftHead]) -> tuple[int, ...]:
    """The target's hidden states that the heads read, those that may draft: in the order of the heads where they agree, else rising."""
    lists = {head.config.taps for head in heads if head.trusted}
    return next(iter(lists)) if len(lists) == 1 else tuple(sorted({tap for taps in lists for tap in taps}))


def wants_hidden(heads: Mapping[str, DraftHead]) -> Callable[[Sequence], bool]:
    """Whether any head reads the hidden states of a sequence: of those that `heads` holds when it is asked."""
    return lambda seq: any(uses(name, h.config.max_positions or None)(seq) for name, h in heads.items() if h.trusted)

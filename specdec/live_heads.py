"""`LiveHeads`: the draft heads of a running engine. Another one is loaded beside it, swapped in between two steps, and on trial.

`load` may run on any thread, as long as it takes: it reads, validates and tries the head, and touches nothing of the engine. `apply`
and `review` belong to the thread that owns the engine, between steps: drafters keep nothing that a step needs, so running requests
go on, and since drafts never decide what is said their texts are the same. What a swap does:
  - the companion KV of the old head goes, a fresh one comes in the new head's shape. The block pool is not sized anew: the draft KV
    then takes more or less memory than was planned at start-up. Sequences that are running start drafting at their next feature.
  - the target's passes return the taps of all heads there are now; the other heads are told where theirs lie.
  - the policy forgets what it knew of the old head, and compares the new one with it (`watch.Comparison`).
The old head itself (its weights) is kept until the new one has been verified on `watch.VERIFIED` drafts; when it proves clearly worse
before that, or collapses, the old head comes back. A policy that never asks the new head keeps both in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specdec.cache.kv import KVCache
from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.models.head_load import load_head
from specdec.spec.head_drafter import HeadDrafter
from specdec.spec.heads import METHODS, taps_of
from specdec.spec.proposer import create
from specdec.spec.watch import Comparison
from specdec.types import Batch

if TYPE_CHECKING:
    from specdec.models.draft_heads import DraftHead
    from specdec.models.load import LoadedModel
    from specdec.runner.runner import ModelRunner
    from specdec.spec.acceptance import DepthRates
    from specdec.spec.policy import SpecPolicy
    from specdec.spec.proposer import DrafterContext, Proposer


@dataclass(frozen=True, slots=True)
class Change:
    """What `load` found and `apply` does: per method the head to put in its place, None = none."""

    heads: Mapping[str, DraftHead | None]


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """A head in use. epoch: digest of config and weights. taps: indices of the hidden states it reads. on_trial: the head before it
    may still come back."""

    method: str
    epoch: str
    taps: tuple[int, ...]
    on_trial: bool


@dataclass(frozen=True, slots=True)
class _Old:
    """What comes back when the new head fails. rates: how deep the old head got."""

    head: DraftHead
    rates: DepthRates


class LiveHeads:
    """context: what the drafters were built from. heads (by method) and proposers are changed in place, in order of preference."""

    def __init__(
        self,
        target: LoadedModel,
        context: DrafterContext,
        runner: ModelRunner,
        heads: dict[str, DraftHead],
        proposers: dict[str, Proposer],
    ):
        self.swaps = 0
        self.rollbacks = 0
        self._target = target
        self._context = context
        self._heads = heads
        self._runner = runner
        self._proposers = proposers
        self._old: dict[str, _Old] = {}  # of the heads on trial

    @property
    def on_trial(self) -> bool:
        """Whether `review` has anything to watch."""
        return bool(self._old)

    def info(self) -> list[HeadInfo]:
        """The heads in use, in order of preference."""
        return [HeadInfo(name, head.epoch, head.config.taps, name in self._old) for name, head in self._heads.items()]

    # -- any thread ---------------------------------------------------------------------------------------------------

    def load(self, path: str | None, method: str | None = None) -> Change:
        """The head at `path` (directory, hub id or shipped name), read, checked against the target and run once; None: no head, of
        `method` or at all. Nothing of the engine changes.

        Raises ConfigError for an engine that takes no heads or not of this kind, ModelNotFound, and UnsupportedCheckpoint for a head
        that cannot be read, does not fit, was trained on another target, or computes what is not a number.
        """
        kinds = self._kinds(method)
        if path is None:
            return Change(dict.fromkeys(kinds))
        config = self._context.config
        head = load_head(path, self._target, draft_quantization=config.draft_quantization)
        if head.config.kind not in kinds:
            raise ConfigError(f"{path!r} is a head for {head.config.kind!r}, not for {' or '.join(kinds)}", param="method")
        if head.warning is not None:
            raise UnsupportedCheckpoint(head.warning, param="head")
        _try(head, path)
        return Change({head.config.kind: head})

    def _kinds(self, method: str | None) -> tuple[str, ...]:
        started = self._context.config.method
        if started not in ("auto", *METHODS):
            raise ConfigError(f"an engine with speculation {started!r} takes no draft head; start it with 'auto'", param="speculation")
        if method is not None and method not in METHODS:
            raise ConfigError(f"method {method!r} has no draft head; choose {' or '.join(METHODS)}", param="method")
        if started != "auto" and method not in (None, started):
            raise ConfigError(f"an engine with speculation {started!r} takes no head for {method!r}; start it with 'auto'", param="method")
        return (method or started,) if method or started != "auto" else METHODS

    # -- the thread that owns the engine, between steps -----------------------------------------------------------------

    def apply(self, change: Change, policy: SpecPolicy) -> None:
        """Swap. When the drafter cannot be built (ConfigError: no memory, or a target without full attention) the old one is built
        again before the error is raised."""
        for name, head in change.heads.items():
            present = self._heads.get(name)
            if head is None and present is None:
                continue
            old = self._old.get(name)  # still the one to compare with, where the present head is on trial itself
            if old is None and present is not None and present.trusted:
                old = _Old(present, policy.experience.drafters[name].rates)
            self._install(name, head)
            self._old.pop(name, None)
            if head is not None and old is not None:
                self._old[name] = old
            comparison = Comparison(old.rates) if name in self._old and old is not None else None
            policy.experience.replace(self._proposers, name, comparison=comparison)
            self.swaps += 1

    def review(self, policy: SpecPolicy) -> None:
        """Let go of old heads whose successors have passed; bring back those whose successors failed."""
        for name, old in list(self._old.items()):
            comparison = policy.experience.watch.comparisons[name]
            if comparison.worse:
                logging.getLogger("specdec").warning(
                    "the new %s head is clearly worse than the one before it after %d drafts; back to that", name, comparison.drafts
                )
                self._install(name, old.head)
                policy.experience.replace(self._proposers, name, rates=old.rates)
                self.rollbacks += 1
            elif comparison.passed:
                policy.experience.watch.comparisons.pop(name)
            else:
                continue
            del self._old[name]

    def _install(self, name: str, head: DraftHead | None) -> None:
        """All but the policy. An error leaves the head that was there, with empty KV."""
        before = dict(self._heads)
        try:
            self._build(name, {n: h for n, h in {**before, name: head}.items() if h is not None})
        except Exception as error:
            self._build(name, before)
            if isinstance(error, torch.OutOfMemoryError):
                raise ConfigError(f"no memory for the {name} head's KV; start with less KV for the target", param="head") from error
            raise

    def _build(self, name: str, heads: dict[str, DraftHead]) -> None:
        """The drafter `name` anew, or none, and everything that depends on which heads there are."""
        context = replace(self._context, heads=heads, taps=taps_of(heads.values()))
        assert context.kv is not None  # an engine has one
        self._proposers.pop(name, None)
        context.kv.detach(name)
        drafters = {**self._proposers, **({name: create(name, context)} if name in heads else {})}
        for drafter in drafters.values():
            if isinstance(drafter, HeadDrafter):
                drafter.retap(context)
        self._runner.taps = context.taps
        self._heads.clear()
        self._heads.update(heads)
        self._proposers.clear()
        self._proposers.update({n: drafters[n] for n in dict.fromkeys((*heads, *drafters))})


@torch.inference_mode()
def _try(head: DraftHead, path: str) -> None:
    """Three rows through the whole head. UnsupportedCheckpoint when logits or feedback are not numbers."""
    c, device, size = head.config, head.device, 16
    kv = KVCache(c.kv_groups(), [2] * len(c.kv_groups()), size, dtype=head.dtype, device=device)
    features = head.fuse(torch.linspace(-1, 1, 2 * c.tap_size, device=device).view(2, -1))
    features = torch.cat((features, features[:1] if head.mask_feature is None else head.mask_feature[None]))
    positions = torch.arange(1, 4, device=device)
    batch = Batch(
        input_ids=torch.tensor([0, 1, c.mask_token_id or 2], device=device),
        positions=positions,
        cu_query=torch.tensor([0, 3], dtype=torch.int32, device=device),
        ctx_lens=torch.ones(1, dtype=torch.int32, device=device),
        tree_len=torch.zeros(1, dtype=torch.int32, device=device),
        tree_mask=torch.zeros(3, dtype=torch.int64, device=device),
        block_tables=torch.ones((1, 1, 1), dtype=torch.int32, device=device),
        slot_mapping=(positions + size)[None],
        logit_rows=positions - 1,
        first_key=torch.ones(1, dtype=torch.int32, device=device),
    )
    hidden, feedback = head.forward(batch, features, kv)
    if not (head.logits(hidden).isfinite().all() and feedback.isfinite().all()):
        raise UnsupportedCheckpoint(f"{path}: the head computes values that are not numbers; its weights are damaged", param="head")

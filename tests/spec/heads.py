"""Draft heads for the engine tests: random ones on T0, one that is right by construction, and drafts computed the plain way."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.config import SpecConfig
from specdec.models.draft_heads import DraftHead
from specdec.models.head_load import load_head
from specdec.models.load import LoadedModel, load_model
from tests.harness import checkpoint
from tests.oracle import PlainKV
from tests.tiny_heads import tiny_head, write_head

TAPS = (0, 1, 2)


@cache
def target(kind: str = "t0") -> LoadedModel:
    """The target of a harness checkpoint, in deterministic mode."""
    return load_model(checkpoint(kind), deterministic=True)


@cache
def random_head(method: str = "eagle3", kind: str = "t0", **flags: Any) -> str:
    """Directory of a random head on a harness checkpoint; its name holds every flag, so that no two heads share a directory."""
    flags = {"taps": TAPS, **flags}
    config, tensors = tiny_head(method, target(kind).config, **flags)
    name = "-".join([method, kind, *(f"{k}={v}" for k, v in sorted(flags.items()))]).replace(" ", "")
    return str(write_head(Path(checkpoint()).parent / "heads" / name, "speculators", config, tensors))


@cache
def knowing_head(method: str = "eagle3", *, flat: float = 1.0, noise_share: float = 1.0) -> str:
    """Directory of a head that knows the target "last", whose next token depends on the newest token alone.

    Its attention sees nothing but the row itself, copies the normalised token embedding, and so large that what the feature adds does
    not count; then come the target's own norm and lm_head. An EAGLE-3 head is therefore always right, at any temperature; a
    P-EAGLE head, whose mask rows know no token, at depth 1. flat: its logits over the target's; such a head is always right
    with a `noise_share` as small.
    """
    model = target("last")
    c = model.config
    config, tensors = tiny_head(
        method,
        c,
        taps=(2,),
        windows=(1,),
        num_heads=4,
        num_kv_heads=4,
        draft_vocab_size=c.vocab_size,
        norm_output=True,
        noise_share=noise_share,
    )
    for name in ("fc.weight", "layers.0.mlp.down_proj.weight", "layers.0.self_attn.v_proj.weight"):
        tensors[name].zero_()
    tensors["layers.0.self_attn.v_proj.weight"][:, : c.hidden_size] = 1e4 * torch.eye(c.hidden_size)
    tensors["layers.0.self_attn.o_proj.weight"] = torch.eye(c.hidden_size)
    tensors["layers.0.input_layernorm.weight"].fill_(1.0)
    tensors["norm.weight"] = model.model.norm.weight.clone()
    tensors["lm_head.weight"] = flat * model.model.lm_head.dequantize()
    name = f"knowing-{method}-{flat}-{noise_share}"
    return str(write_head(Path(checkpoint()).parent / "heads" / name, "speculators", config, tensors))


def chain(method: str, depth: int = 4, *, head: str | None = None, **fields: Any) -> SpecConfig:
    return SpecConfig(method=method, head=head or random_head(method), nodes=depth + 1, depth=depth, width=1, policy="fixed", **fields)


def tree(method: str, nodes: int = 12, depth: int = 3, width: int = 3, *, head: str | None = None, **fields: Any) -> SpecConfig:
    return SpecConfig(method=method, head=head or random_head(method), nodes=nodes, depth=depth, width=width, policy="fixed", **fields)


SHAPES = {f"{method} {name}": shape(method) for method in ("eagle3", "peagle") for name, shape in (("chain", chain), ("TREE", tree))}
SHAPES |= {
    f"following {name}": shape("peagle", head=random_head("peagle", transition=24)) for name, shape in (("chain", chain), ("TREE", tree))
}


@dataclass
class Plain:
    """Drafts without an engine: one sequence in consecutive blocks, every pass from the start, one row at a time."""

    head_path: str
    kind: str = "t0"
    head: DraftHead = field(init=False)

    def __post_init__(self) -> None:
        self.head = load_head(self.head_path, target(self.kind))

    @torch.inference_mode()
    def logits(self, tokens: Seq[int], path: Seq[int] = ()) -> Tensor:
        """[Vd] of the token after `tokens` and the draft tokens `path`."""
        features, store = self._start(tokens, len(path))
        hidden, feedback = self.head.forward(self._batch(store, list(tokens[1:]), 1), features, store)
        for i, token in enumerate(path):
            hidden, feedback = self.head.forward(self._batch(store, [token], len(tokens) + i), feedback[-1:], store)
        return self.head.logits(hidden[-1:])[0]

    @torch.inference_mode()
    def _states(self, tokens: Seq[int], depth: int) -> Tensor:
        """[depth, Hd] of a P-EAGLE head: behind the newest token, and of the mask rows."""
        head, masks = self.head, depth - 1
        features, store = self._start(tokens, masks)
        assert head.mask_feature is not None and head.config.mask_token_id is not None
        features = torch.cat([features, head.mask_feature.expand(masks, -1)])
        ids = [*tokens[1:], *[head.config.mask_token_id] * masks]
        return head.forward(self._batch(store, ids, 1), features, store)[0][-depth:]

    def _start(self, tokens: Seq[int], room: int) -> tuple[Tensor, PlainKV]:
        """Features of all tokens but the newest, and empty draft KV for them and `room` more."""
        head, model, count = self.head, target(self.kind).model, len(tokens)
        plain = PlainKV(model.config, count)
        _, taps = model.forward(plain.batch(tokens), plain, taps=head.config.taps)
        assert taps is not None
        return head.fuse(taps[: count - 1]), PlainKV(head.config, count + room)  # type: ignore[arg-type]  # has what PlainKV reads

    @staticmethod
    def _batch(store: PlainKV, ids: list[int], start: int) -> Any:
        return replace(store.batch(ids, start), first_key=torch.ones(1, dtype=torch.int32))

    def greedy(self, tokens: Seq[int], depth: int) -> list[int]:
        """The greedy chain of an EAGLE-3 head, target ids."""
        path: list[int] = []
        for _ in range(depth):
            path.append(int(self.head.target_ids[self.logits(tokens, path).argmax()]))
        return path

    def marginals(self, tokens: Seq[int], depth: int) -> Tensor:
        """[depth, Vd] of a P-EAGLE head."""
        return self.head.logits(self._states(tokens, depth))

    @torch.inference_mode()
    def follower(self, tokens: Seq[int], depth: int, before: int) -> Tensor:
        """[Vd] of a P-EAGLE head with a transition: the draft of `depth` (≥ 2), given the one before it."""
        hidden = self._states(tokens, depth)[-1:]
        return self.head.logits(self.head.follow(hidden, torch.tensor([before])))[0]

    def best(self, logits: Tensor, width: int) -> set[int]:
        """Target ids of the likeliest tokens."""
        return set(self.head.target_ids[logits.topk(width).indices].tolist())

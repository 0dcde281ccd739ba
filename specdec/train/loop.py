"""The training loop: fitted to a number of steps or of minutes, seeded, resumable, logged step by step."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specdec.errors import ConfigError
from specdec.train.capture import Capture
from specdec.train.data import Corpus, TokenBatch, epoch
from specdec.train.loss import (
    Entries,
    Labels,
    chain_entries,
    hits,
    label_mask,
    make_labels,
    rollout_entries,
    soft_cross_entropy,
    transition_loss,
)
from specdec.train.model import TrainableHead
from specdec.train.progress import bar_interval
from specdec.train.rollouts import arrange, sample_depths

Features = Callable[[TokenBatch], Capture]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How to train. Exactly one of `steps` and `minutes` is set; the schedule is fitted to it.

    depths: drafts learned, i.e. unrolled steps (EAGLE-3) or depths of a parallel pass (P-EAGLE). batch_tokens: padded
    tokens a step. warmup: share of the run. decay: weight of each depth over the one before. keep, floor: P-EAGLE's drop
    rate by depth (see `sample_depths`). save_every, log_every: steps. validations: walks over held-out texts in a run.
    """

    depths: int = 7
    steps: int | None = None
    minutes: float | None = None
    batch_tokens: int = 32_768
    lr: float = 1e-3
    warmup: float = 0.03
    clip: float = 1.0
    weight_decay: float = 0.0
    decay: float = 0.8
    keep: float = 0.8
    floor: float = 0.2
    seed: int = 0
    log_every: int = 20
    save_every: int = 1000
    validations: int = 10

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("set exactly one of steps and minutes", param="minutes")
        for name in ("depths", "batch_tokens", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", param=name)


def score(
    head: TrainableHead, batch: TokenBatch, captured: Capture, labels: Labels, depths: int, kept: Tensor | None = None
) -> tuple[Tensor, Entries]:
    """Run the head on a batch: (hidden states [E, Hd] of the predictions to score, the predictions).

    kept [B, L] i64: which mask rows a parallel head runs (`sample_depths`); None for a recurrent head.
    """
    length = batch.tokens.shape[1]
    if kept is None:
        hidden = head.unroll(batch.tokens, captured.taps, depths).flatten(0, 2)
        entries = chain_entries(labels, length, depths)
    else:
        place, counts = arrange(kept, depths)
        states, rollouts = head.parallel(batch.tokens, captured.taps, place, counts)
        hidden = states.flatten(0, 1)
        entries = rollout_entries(labels, rollouts, kept, length)
    return hidden.index_select(0, entries.row), entries


class Trainer:
    """Trains `head` in place. features: captures of a batch (`FeatureStore` or `Online`). lm_head [V, H]: the target's.

    validate: acceptance lengths on held-out texts, by chain length. directory gets metrics.jsonl (a line every `log_every`
    steps), validation.jsonl and state.pt (everything needed to resume).
    """

    def __init__(
        self,
        head: TrainableHead,
        features: Features,
        lm_head: Tensor,
        corpus: Corpus,
        config: TrainConfig,
        directory: Path,
        *,
        validate: Callable[[], list[float]] | None = None,
    ):
        self.head, self.features, self.corpus, self.config, self.directory = head, features, corpus, config, directory
        self.device = head.target_ids.device
        self.lm_head = lm_head[head.target_ids].float()
        self._validate = validate
        fused, decay = self.device.type == "cuda", config.weight_decay
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=decay, fused=fused)
        self.step, self.epoch, self.taken, self.elapsed = 0, 0, 0, 0.0  # taken: batches of this epoch
        self._counts = torch.zeros(4, config.depths, dtype=torch.float64, device=self.device)
        self._loss, self._seen, self._tokens = torch.zeros((), device=self.device), 0, 0
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def fraction(self) -> float:
        """How much of the run is over, 0 … 1."""
        if self.config.steps is not None:
            return min(1.0, self.step / self.config.steps)
        assert self.config.minutes is not None  # TrainConfig checks
        return min(1.0, self.elapsed / (60 * self.config.minutes))

    def run(self, *, stop_after: int | None = None, pause: float | None = None, progress: bool = True) -> None:
        """Train to the end of the schedule, or for `stop_after` steps or `pause` minutes. State is saved at the end."""
        last = None if stop_after is None else self.step + stop_after
        until = math.inf if pause is None else self.elapsed + 60 * pause
        clock, before = time.monotonic(), self.elapsed
        with tqdm(total=100, disable=not progress, unit="%", desc=f"train {self.head.config.kind}", mininterval=bar_interval()) as bar:
            batches = self._batches()
            while self.fraction < 1.0 and self.step != last and self.elapsed < until:
                done = self.fraction
                self._update(next(batches))
                self.elapsed = before + time.monotonic() - clock
                if int(self.fraction * self.config.validations) > int(done * self.config.validations):
                    self._look(bar)
                bar.update(round(100 * self.fraction, 1) - bar.n)
                if self.step % self.config.log_every == 0:
                    bar.set_postfix_str(self._log(), refresh=False)
                if self.step % self.config.save_every == 0:
                    self.save()
        self.save()

    def _batches(self) -> Iterator[TokenBatch]:
        """Batches without end, from where the state is."""
        while True:
            skip = self.taken
            for number, batch in enumerate(epoch(self.corpus, self.config.batch_tokens, self.config.seed, self.epoch)):
                if number >= skip:
                    self.taken = number + 1
                    yield batch
            self.epoch, self.taken = self.epoch + 1, 0

    def _update(self, batch: TokenBatch) -> None:
        batch = batch.to(self.device)
        captured = self.features(batch)
        labels = make_labels(batch, captured, self.lm_head)
        hidden, entries = score(self.head, batch, captured, labels, self.config.depths, self._kept(batch))
        scale = self.config.decay ** entries.depth.float() / max(1, len(labels.where))
        loss, best = soft_cross_entropy(hidden, self.head.lm_head.weight, labels.law, entries.label, scale)
        if self.head.transition is not None:
            loss = loss + transition_loss(self.head, hidden, entries, labels, batch.tokens, scale, self.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        self.step += 1
        right = self.head.target_ids[best] == labels.best[entries.label]
        self._counts += hits(entries, right, batch.tokens.numel(), self.config.depths)
        self._loss += loss.detach()
        self._seen, self._tokens = self._seen + 1, self._tokens + len(labels.where)

    def _kept(self, batch: TokenBatch) -> Tensor | None:
        """The rollouts of a parallel head in this step, drawn from (seed, step)."""
        if self.head.config.kind != "peagle":
            return None
        generator = torch.Generator(self.device).manual_seed(self.config.seed * 1_000_003 + self.step)
        return sample_depths(label_mask(batch), self.config.depths, self.config.keep, self.config.floor, generator)

    @property
    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to 0."""
        at, warmup = self.fraction, self.config.warmup
        if self.config.steps is not None:
            at = min(1.0, (self.step + 1) / self.config.steps)
        if at < warmup:
            return self.config.lr * max(at, 1e-3) / warmup
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * (at - warmup) / (1 - warmup)))

    def _log(self) -> str:
        """Append a line to metrics.jsonl; returns the short form."""
        predicted, right, whole, all_right = (row.tolist() for row in self._counts)
        accuracy = [round(r / max(p, 1), 4) for p, r in zip(predicted, right, strict=True)]
        joint = [round(r / max(w, 1), 4) for w, r in zip(whole, all_right, strict=True)]
        line = {
            "step": self.step,
            "epoch": self.epoch,
            "seconds": round(self.elapsed, 2),
            "lr": self.learning_rate,
            "loss": float(self._loss) / self._seen,
            "labels": self._tokens,
            "accuracy": accuracy,
            "joint": joint,
            "conditional": [round(b / max(a, 1e-9), 4) for a, b in zip([1.0, *joint], joint, strict=False)],
        }
        with (self.directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._counts.zero_()
        self._loss.zero_()
        self._seen, self._tokens = 0, 0
        return f"loss {line['loss']:.3f} acc {accuracy[0]:.3f} chain {1 + sum(joint):.2f}"

    def _look(self, bar: tqdm[Any]) -> None:
        """Walk the held-out texts and append a line to validation.jsonl. The time it takes counts."""
        if self._validate is None:
            return
        lengths = self._validate()
        bar.write(f"step {self.step}: held-out acceptance length {lengths}", file=sys.stderr)
        with (self.directory / "validation.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, "seconds": round(self.elapsed, 2), "lengths": lengths}) + "\n")

    def save(self) -> None:
        """Write state.pt; it replaces the older one only when whole."""
        state = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "config": asdict(self.config),
            "step": self.step,
            "epoch": self.epoch,
            "taken": self.taken,
            "elapsed": self.elapsed,
        }
        part = self.directory / "state.pt.part"
        torch.save(state, part)
        part.replace(self.directory / "state.pt")

    def resume(self) -> bool:
        """Go on from state.pt; False when there is none. ConfigError when it was written under another config."""
        file = self.directory / "state.pt"
        if not file.is_file():
            return False
        state = torch.load(file, map_location=self.device, weights_only=True)
        if state["config"] != asdict(self.config):
            raise ConfigError(f"{file} belongs to another training config ({state['config']}); choose another directory", param="out")
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch, self.taken = state["step"], state["epoch"], state["taken"]
        self.elapsed = state["elapsed"]
        return True

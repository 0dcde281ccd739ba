"""From shards of answers to an exported head: vocabulary, config, training, evaluation, export."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.models.head_config import HeadConfig, default_taps
from specdec.models.head_export import export_head
from specdec.models.head_files import read_tensors
from specdec.models.head_fingerprint import measure as measure_fingerprint
from specdec.models.head_load import converted, load_head
from specdec.paths import without_path
from specdec.train.capture import DenseTarget, FeatureStore, Online
from specdec.train.card import model_card
from specdec.train.data import Corpus, coverage, draft_vocabulary, join, read_corpus
from specdec.train.evaluate import Acceptance, simulate
from specdec.train.loop import Features, TrainConfig, Trainer
from specdec.train.model import TrainableHead
from specdec.train.plot import plot_metrics
from specdec.train.prompts import held_out
from specdec.version import __version__

if TYPE_CHECKING:
    from specdec.models.load import LoadedModel

DRAFT_VOCAB = 12_288
STORE_SHARE = 0.75  # of the free device memory that captured features may take; a step needs some 20 GiB beside them


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What kind of head, on which part of the data.

    taps: None = 2, L/2, L - 3. window: of the draft's attention, None = full. max_len: sequences are cut after so many tokens;
    unended: and answers that never ended (a weak target's loops) after so many of their own, 0 = kept. mask_token_id:
    P-EAGLE's placeholder, None = a special token that the corpus never uses. transition: size of its correction by the draft before
    (`models.transition`), 0 = none. validation: share of the prompts held out.
    storage: number format of the exported matrices. init: directory of an exported head to start from: every tensor that has the
    same shape in the new head is kept, and its draft vocabulary with the rows of lm_head.
    draft_vocab: tokens of the draft vocabulary, None = `init`'s, or DRAFT_VOCAB; `init`'s is never cut, only added to.
    """

    kind: str = "eagle3"
    num_layers: int = 1
    draft_vocab: int | None = None
    taps: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    window: int | None = None
    max_len: int = 1024
    unended: int = 0
    mask_token_id: int | None = None
    transition: int = 0
    validation: float = 0.02
    storage: str = "bfloat16"
    init: str | None = None


@dataclass(frozen=True, slots=True)
class Splits:
    """Training sequences and held-out ones of temperature 0."""

    train: Corpus
    validation: Corpus


def split(corpus: Corpus, fraction: float) -> Splits:
    """By prompt: every answer to a held-out prompt is kept from training; those of temperature 0 are walked in evaluation."""
    held = [held_out(prompt_id, fraction) for prompt_id in corpus.prompt_ids]
    greedy = (corpus.temperature == 0).tolist()
    train = corpus.take([i for i, h in enumerate(held) if not h])
    if not len(train):
        raise ConfigError(f"no training sequences are left beside a validation share of {fraction}", param="validation")
    return Splits(train, corpus.take([i for i, h in enumerate(held) if h and greedy[i]]))


def make_head_config(loaded: LoadedModel, corpus: Corpus, options: HeadOptions, depths: int, known: int) -> HeadConfig:
    """The head's shape: the target's own sizes, the norms of EAGLE-3.1. known: draft tokens of the head to start from, 0 = none."""
    target = loaded.config
    wanted = (known or DRAFT_VOCAB) if options.draft_vocab is None else options.draft_vocab
    mask = options.mask_token_id
    if options.kind == "peagle" and mask is None:
        mask = unused_token(loaded, corpus)
    return HeadConfig.of_target(
        options.kind,
        target,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_layers=options.num_layers,
        draft_vocab_size=max(known, min(wanted, target.vocab_size)),
        taps=options.taps or default_taps(target.num_layers),
        max_positions=options.max_len,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        windows=(options.window,) * options.num_layers,
        mask_token_id=mask if options.kind == "peagle" else None,
        num_depths=depths,
        transition=options.transition if options.kind == "peagle" else 0,
    )


def unused_token(loaded: LoadedModel, corpus: Corpus) -> int:
    """A token id that no text uses, so that it can mean "to be guessed": a special token if there is one, else the highest id."""
    counts = torch.bincount(corpus.tokens, minlength=loaded.config.vocab_size)
    for candidates in (sorted(loaded.tokenizer.special_ids - set(loaded.config.eos_ids)), range(loaded.config.vocab_size)):
        unused = [i for i in candidates if counts[i] == 0]
        if unused:
            return unused[-1]
    raise ConfigError("every token id occurs in the corpus; name the least harmful one", param="mask_token_id")


class Recipe:
    """Everything of one run. `run` trains to the end; the parts can be used alone (tests, experiments).

    command: program and arguments that started the run, for its record; empty when there was none (a notebook).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        data: Sequence[Path],
        out: Path,
        options: HeadOptions,
        config: TrainConfig,
        *,
        command: Sequence[str] = (),
    ):
        self.loaded, self.out, self.options, self.train_config, self.command = loaded, out, options, config, command
        corpus = join([read_corpus(directory) for directory in data]).cut(options.max_len, options.unended)
        self.splits = split(corpus, options.validation)
        known = [] if options.init is None else load_head(options.init, loaded).target_ids.tolist()
        self.config = make_head_config(loaded, corpus, options, config.depths, len(known))
        self.target = DenseTarget(loaded.model, self.config.taps)
        vocab = loaded.config.vocab_size
        always = known or sorted(loaded.config.eos_ids)
        self.target_ids = draft_vocabulary(self.splits.train, self.config.draft_vocab_size, vocab, always)
        self.coverage = coverage(self.splits.train, self.target_ids, vocab)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            head = TrainableHead(self.config, self.target.embedding.cpu(), self.target_ids)
        head.start_from(loaded.model.norm.weight.float().cpu(), self.target.lm_head.float().cpu())
        if options.init is not None:
            copy_tensors(head, Path(options.init), known=torch.tensor(known))
        self.head = head.to(self.target.device)

    def run(self, *, resume: bool = False, pause: float | None = None, progress: bool = True) -> dict[str, Any] | None:
        """Train (or go on from state.pt), evaluate, export to `out`/head; returns the report, which is also `out`/report.json.

        pause: minutes after which to stop early and return None, with everything saved to resume from.
        """
        trainer = self.trainer()
        if not (resume and trainer.resume()):
            for name in ("metrics.jsonl", "validation.jsonl"):
                (self.out / name).unlink(missing_ok=True)
        trainer.run(pause=pause, progress=progress)
        if trainer.fraction < 1.0:
            return None
        report = self.report(trainer)
        self.export(report)
        (self.out / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        plot_metrics(self.out, self.out / "training.svg")
        return report

    def trainer(self) -> Trainer:
        features = open_features(self.target, self.splits.train)
        validate = self.validate if len(self.splits.validation) else None
        return Trainer(self.head, features, self.target.lm_head, self.splits.train, self.train_config, self.out, validate=validate)

    def validate(self) -> list[float]:
        """Acceptance lengths of chains of 1, 2, … drafts on the held-out texts."""
        return self._walk()["all"].lengths

    def _walk(self) -> dict[str, Acceptance]:
        return evaluate(self.head, Online(self.target), self.splits.validation, self.train_config.depths)

    def report(self, trainer: Trainer) -> dict[str, Any]:
        """What was trained on what, and how far it gets on the held-out texts."""
        train = self.splits.train
        return {
            "specdec": __version__,
            "torch": torch.__version__,
            "command": shlex.join(without_path(arg) for arg in self.command),
            "target": {"name": Path(self.loaded.name).name, "fingerprint": self.loaded.fingerprint},
            "options": asdict(self.options) | {"init": self.options.init and without_path(self.options.init)},
            "training": asdict(self.train_config),
            "sequences": len(train),
            "answer_tokens": train.num_answer_tokens,
            "temperatures": sorted({round(t, 4) for t in train.temperature.tolist()}),
            "draft_vocab": len(self.target_ids),
            "coverage": round(self.coverage, 5),
            "features": type(trainer.features).__name__,
            "parameters": sum(p.numel() for p in self.head.parameters()),
            "steps": trainer.step,
            "epochs": trainer.epoch,
            "seconds": round(trainer.elapsed, 1),
            "acceptance": {domain: a.to_json() for domain, a in self._walk().items()},
        }

    def export(self, report: dict[str, Any]) -> Path:
        """Write the head and its card, in the speculators layout, with the report as its provenance."""
        directory = export_head(
            self.out / "head",
            replace(self.config, provenance=report),
            exported_tensors(self.head),
            fingerprint=measure_fingerprint(self.loaded.model, self.config.taps),
            provenance=report,
            storage=self.options.storage,
            verifier=Path(self.loaded.name).name,
        )
        (directory / "README.md").write_text(model_card(report), encoding="utf-8")
        return directory


@torch.no_grad()
def copy_tensors(head: TrainableHead, directory: Path, precision: str | None = None, known: Tensor | None = None) -> list[str]:
    """Start from an exported head, wherever name and shape agree; returns the names. precision: storage its matrices are rounded
    to first, None = the file's. known [n] i64: target ids of the exported lm_head's rows, None = those of `head`.
    ConfigError when no name agrees."""
    read = {name: converted(t, precision) for name, t in read_tensors(directory).items()}
    stored = {name: t if isinstance(t, Tensor) else t.dequantize() for name, t in read.items()}
    rows = stored.get("lm_head.weight")
    if known is not None and rows is not None and rows.shape[1] == head.config.hidden_size:  # rows of new tokens stay as they are
        stored["lm_head.weight"] = head.lm_head.weight.index_copy(0, torch.searchsorted(head.target_ids, known), rows.float())
    names = [name for name, p in head.named_parameters() if name in stored and stored[name].shape == p.shape]
    if not names:
        raise ConfigError(f"{directory}: no tensor of this head has the shape of one in the new head", param="init")
    for name in names:
        head.get_parameter(name).copy_(stored[name])
    return names


def exported_tensors(head: TrainableHead) -> dict[str, Tensor]:
    """Parameters by internal name, and the maps between the vocabularies (d2t as offsets)."""
    ids = head.target_ids.cpu()
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[ids] = True
    tensors = {name: p.detach().float().cpu() for name, p in head.named_parameters()}
    return tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def open_features(target: DenseTarget, corpus: Corpus) -> Features:
    """Captures kept on the device where they take at most STORE_SHARE of the free memory (1 GiB on the CPU); else online."""
    room = 1 << 30
    if target.device.type == "cuda":
        room = int(torch.cuda.mem_get_info(target.device)[0] * STORE_SHARE)
    if len(corpus.tokens) * FeatureStore.bytes_per_token(target) <= room:
        return FeatureStore(target, corpus)
    return Online(target)


def evaluate(head: TrainableHead, features: Features, corpus: Corpus, depths: int) -> dict[str, Acceptance]:
    """`simulate`, or nothing when there are no texts of temperature 0."""
    return simulate(head, features, corpus, depths=depths) if len(corpus) else {}


def evaluate_exported(
    loaded: LoadedModel, directory: Path, data: Sequence[Path], *, depths: int, max_len: int, ended_only: bool = False
) -> dict[str, Acceptance]:
    """Walk an exported head over all answers of temperature 0 in `data`, or only those that came to their natural end."""
    corpus = join([read_corpus(d) for d in data]).cut(max_len)
    greedy = corpus.take(((corpus.temperature == 0) & (corpus.ended | (not ended_only))).nonzero().squeeze(1).tolist())
    loaded_head = load_head(directory, loaded)
    target = DenseTarget(loaded.model, loaded_head.config.taps)
    head = TrainableHead(loaded_head.config, target.embedding.cpu(), loaded_head.target_ids.cpu())
    copy_tensors(head, directory)
    return evaluate(head.to(target.device), Online(target), greedy, depths)

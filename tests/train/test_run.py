"""The whole road on a tiny model: answers, training, resuming, export, loading, evaluation, by the commands users type."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from specdec.cli import main as cli
from specdec.errors import ConfigError
from specdec.models.head_load import load_head
from specdec.models.load import LoadedModel, load_model
from specdec.train.__main__ import main
from specdec.train.capture import Online
from specdec.train.data import read_corpus
from specdec.train.evaluate import simulate
from specdec.train.loop import TrainConfig
from specdec.train.recipe import HeadOptions, Recipe, evaluate_exported
from tests.tiny import EOS
from tests.train.corpus import CYCLE, write_work

CONFIG = TrainConfig(depths=3, steps=24, batch_tokens=768, lr=1e-2, log_every=4, save_every=1000)
OPTIONS = HeadOptions(draft_vocab=64, max_len=96, validation=0.25, storage="float32")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_work(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def loaded(work: Path) -> LoadedModel:
    return load_model(work / "model")


def recipe(loaded: LoadedModel, work: Path, out: Path, kind: str = "eagle3", *, transition: int = 0, **training: Any) -> Recipe:
    options = replace(OPTIONS, kind=kind, transition=transition)
    made = Recipe(loaded, [work / "cycle"], out, options, replace(CONFIG, **training))
    made.target.capture = _lawful(made)  # type: ignore[method-assign]
    return made


def _lawful(made: Recipe) -> Any:
    """Captures whose law names the text's own next token: what a target that wrote these texts would say."""
    capture = type(made.target).capture

    def captured(tokens: torch.Tensor, **options: Any) -> Any:
        got = capture(made.target, tokens, **options)
        following = 100 + (tokens - 100 + 1) % CYCLE
        weight = made.target.lm_head
        hidden = 40 * weight[following] / weight[following].square().sum(-1, keepdim=True)
        logits = (hidden @ weight.T).float()
        return replace(got, hidden=hidden, log_z=logits.logsumexp(-1), top=following)

    return captured


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("kind", "transition"), [("eagle3", 0), ("peagle", 0), ("peagle", 16)])
def test_a_head_learns_and_its_export_is_the_same_head(loaded: LoadedModel, work: Path, tmp_path: Path, kind: str, transition: int) -> None:
    made = recipe(loaded, work, tmp_path, kind, transition=transition)
    report = made.run(progress=False)
    assert report is not None
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(4, 25, 4))
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    held_out = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in held_out] == [3, 5, 8, 10, 12, 15, 17, 20, 22, 24]
    assert held_out[-1]["lengths"] == report["acceptance"]["all"]["lengths"]
    assert report["coverage"] == 1.0 and report["steps"] == 24
    everywhere = report["acceptance"]["all"]
    assert set(report["acceptance"]) == {"a", "b", "all"}
    assert everywhere["lengths"][2] > 2.5 and everywhere["lengths"][0] > 1.6
    assert sum(everywhere["positions"]) == pytest.approx(everywhere["lengths"][2] - 1, abs=0.1)
    picture = ElementTree.parse(tmp_path / "training.svg").getroot()
    assert len(picture.findall("{*}polyline")) == 1 + 3 * CONFIG.depths
    head = load_head(tmp_path / "head", loaded)
    assert head.trusted and head.target_ids.tolist() == made.target_ids.tolist() and EOS in head.target_ids.tolist()
    assert head.config.provenance["answer_tokens"] == report["answer_tokens"]
    again = evaluate_exported(loaded, tmp_path / "head", [work / "cycle"], depths=3, max_len=96)
    greedy = read_corpus(work / "cycle")
    whole = greedy.take([i for i, t in enumerate(greedy.temperature.tolist()) if t == 0])
    wanted = simulate(made.head, Online(made.target), whole, depths=3)
    assert {name: a.to_json() for name, a in again.items()} == {name: a.to_json() for name, a in wanted.items()}


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_resumed_run_gives_the_same_weights(loaded: LoadedModel, work: Path, tmp_path: Path, kind: str) -> None:
    short = {"steps": 6, "log_every": 2}
    straight = recipe(loaded, work, tmp_path / "a", kind, **short)
    straight.trainer().run(progress=False)
    first = recipe(loaded, work, tmp_path / "b", kind, **short)
    first.trainer().run(stop_after=4, progress=False)
    second = recipe(loaded, work, tmp_path / "b", kind, **short)
    trainer = second.trainer()
    assert trainer.resume() and trainer.step == 4
    trainer.run(progress=False)
    assert trainer.step == 6
    for (name, a), (_, b) in zip(straight.head.named_parameters(), second.head.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert [line["step"] for line in metrics(tmp_path / "b")] == [2, 4, 6]
    with pytest.raises(ConfigError, match="another training config"):
        recipe(loaded, work, tmp_path / "b", kind, steps=7).trainer().resume()


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_training_in_bfloat16_over_float32_weights(work: Path, tmp_path: Path, kind: str) -> None:
    """The dtypes of CUDA, on any device."""
    made = recipe(load_model(work / "model", dtype="bfloat16"), work, tmp_path, kind)
    assert made.target.dtype == torch.bfloat16
    report = made.run(progress=False)
    assert report is not None
    assert {p.dtype for p in made.head.parameters()} == {torch.float32}
    assert metrics(tmp_path)[-1]["loss"] < 0.5 * metrics(tmp_path)[0]["loss"]
    assert report["acceptance"]["all"]["lengths"][2] > 2.5


def test_a_paused_run_goes_on(loaded: LoadedModel, work: Path, tmp_path: Path) -> None:
    assert recipe(loaded, work, tmp_path, steps=3).run(pause=1e-6, progress=False) is None
    assert not (tmp_path / "head").exists()
    report = recipe(loaded, work, tmp_path, steps=3).run(resume=True, progress=False)
    assert report is not None and report["steps"] == 3


def test_a_head_can_start_from_another(loaded: LoadedModel, work: Path, tmp_path: Path) -> None:
    first = recipe(loaded, work, tmp_path / "first", steps=2)
    first.run(progress=False)
    options = replace(OPTIONS, kind="peagle", num_layers=2, draft_vocab=None, init=str(tmp_path / "first" / "head"))
    second = Recipe(loaded, [work / "cycle"], tmp_path / "second", options, CONFIG)
    known = dict(first.head.named_parameters())
    assert second.target_ids.tolist() == first.target_ids.tolist()
    fresh = [name for name, p in second.head.named_parameters() if name not in known or not torch.equal(p, known[name])]
    assert fresh and all(name == "mask_hidden" or name.startswith("layers.1.") for name in fresh)


def test_the_vocabulary_of_a_head_can_grow(loaded: LoadedModel, work: Path, tmp_path: Path) -> None:
    first = recipe(loaded, work, tmp_path / "first", steps=2)
    first.run(progress=False)
    options = replace(OPTIONS, draft_vocab=100, init=str(tmp_path / "first" / "head"))
    second = Recipe(loaded, [work / "cycle"], tmp_path / "second", options, replace(CONFIG, steps=1))
    known, grown = first.target_ids.tolist(), second.target_ids.tolist()
    assert len(grown) == 100 and grown == sorted(grown) and set(known) < set(grown)
    for row, token in enumerate(grown):
        expected = first.head.lm_head.weight[known.index(token)] if token in known else second.target.lm_head[token]
        assert torch.equal(second.head.lm_head.weight[row].detach(), expected.detach().float())
    assert second.run(progress=False) is not None


def test_the_card_names_the_numbers(loaded: LoadedModel, work: Path, tmp_path: Path) -> None:
    report = recipe(loaded, work, tmp_path, steps=2).run(progress=False)
    card = (tmp_path / "head" / "README.md").read_text(encoding="utf-8")
    assert report is not None and "EAGLE-3 draft head for model" in card and loaded.fingerprint in card
    assert report["command"] == "" and "Command" not in card  # there was none
    row = next(line for line in card.splitlines() if line.startswith("| all |"))
    assert row.split("|")[3:-1] == [f" {value:.2f} " for value in report["acceptance"]["all"]["lengths"]]


def test_minutes_bound_a_run(loaded: LoadedModel, work: Path, tmp_path: Path) -> None:
    made = recipe(loaded, work, tmp_path, steps=None, minutes=1e-4)
    trainer = made.trainer()
    assert not trainer.resume() and trainer.fraction == 0.0
    trainer.run(progress=False)
    assert trainer.fraction == 1.0 and trainer.step >= 1 and trainer.elapsed >= 0.006


def test_the_commands(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(work / "model")
    answers = ["generate", "--model", model, "--device", "cpu", "--prompts", str(work / "prompts.jsonl"), "--temperatures", "0", "1"]
    answers += ["--max-tokens", "12", "--max-model-len", "128", "--shard-size", "5", "--max-num-seqs", "8"]
    assert main([*answers, "--out", str(tmp_path / "whole")]) == 0
    for part in ("1/2", "0/2", "0/2"):
        assert cli(["train", *answers, "--out", str(tmp_path / "parts"), "--part", part]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["answer_tokens_written"] == 0  # the third run found all shards
    whole, parts = read_corpus(tmp_path / "whole"), read_corpus(tmp_path / "parts")
    assert torch.equal(whole.tokens, parts.tokens) and whole.prompt_ids == parts.prompt_ids
    assert len(whole) == 2 * (6 + 3)  # one sequence a turn and temperature
    assert main([*answers, "--seed", "1", "--out", str(tmp_path / "whole")]) == 1
    assert "another config" in capsys.readouterr().err
    assert main([*answers, "--limit", "5", "--out", str(tmp_path / "whole")]) == 1
    assert "other prompts" in capsys.readouterr().err
    out = tmp_path / "run"
    train = ["eagle3", "--model", model, "--device", "cpu", "--data", str(tmp_path / "whole"), "--out", str(out), "--smoke"]
    assert main(train) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = metrics(out)
    assert report["steps"] == lines[-1]["step"] and lines[-1]["loss"] < lines[0]["loss"]
    assert load_head(out / "head", load_model(model)).trusted
    assert main(["evaluate", "--model", model, "--head", str(out / "head"), "--data", str(tmp_path / "whole"), "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["walked"]["all"]["lengths"][0] >= 1.0
    assert main(["plot", str(out), str(tmp_path / "p.svg")]) == 0 and (tmp_path / "p.svg").is_file()


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_walk_is_what_the_engine_does(work: Path, tmp_path: Path, capsys: Any, kind: str) -> None:
    """Chains of 3 drafts over answers of temperature 0: the same number of target passes, simulated and served."""
    model = ["--model", str(work / "model"), "--device", "cpu"]
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": f"s{i}", "domain": "d", "turns": ["a b c d e f g"[i:]]} for i in range(8)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    prompts = ["--prompts", str(file), "--max-tokens", "40", "--max-model-len", "128"]
    assert main(["generate", *model, *prompts, "--temperatures", "0", "--out", str(tmp_path / "data")]) == 0
    train = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), "--steps", "40", "--depths", "3", "--lr", "1e-2"]
    sizes = ["--batch-tokens", "1024", "--draft-vocab", "256", "--validation", "0", "--storage", "float32"]
    assert main([kind, *model, *train, *sizes]) == 0
    evaluate = ["evaluate", *model, *prompts, "--head", str(tmp_path / "run" / "head"), "--data", str(tmp_path / "data")]
    assert main([*evaluate, "--depths", "3", "--width", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    walked, served = found["walked"]["all"], found["served"]["all"]
    assert walked["lengths"][2] > 1.5  # it learned something to be accepted
    assert (served["steps"] - 8, served["tokens"] - 8) == (walked["steps"][2], walked["tokens"][2])  # but for the prompts' own passes


def test_answers_belong_to_their_prompts(work: Path, tmp_path: Path) -> None:
    from specdec.train.generate import GenerateConfig, Talk, converse, open_target
    from specdec.train.prompts import read_prompts

    llm = open_target(str(work / "model"), device="cpu", max_model_len=128)
    config = GenerateConfig(max_tokens=10)
    talks = [Talk(prompt, 0.0, []) for prompt in read_prompts([work / "prompts.jsonl"])]
    found = converse(llm, talks, config)
    for answer in found:
        prompt, written = answer.tokens[: answer.prompt_len], answer.tokens[answer.prompt_len :]
        assert llm.tokenizer.decode(prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
        assert answer.ended == (written[-1] == EOS) and 1 <= len(written) <= 10
    second = [a for a in found if a.prompt_id == "q1"][1]
    text = llm.tokenizer.decode(second.tokens[: second.prompt_len], skip_special_tokens=False)
    assert text.count("<|im_start|>") == 4 and "three" in text
    long = open_target(str(work / "model"), device="cpu", max_model_len=24)
    assert len(converse(long, [Talk(t.prompt, 0.0, []) for t in talks], config)) < len(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3", "--minutes", "1"], "exactly one"),
        ([], "exactly one"),
        (["--steps", "3", "--draft-vocab", "0"], "draft"),
        (["--steps", "3", "--taps", "9", "1"], "taps"),
    ],
)
def test_wrong_arguments_are_one_line(work: Path, tmp_path: Path, capsys: Any, arguments: list[str], message: str) -> None:
    command = ["eagle3", "--model", str(work / "model"), "--device", "cpu", "--data", str(work / "cycle"), "--out", str(tmp_path / "o")]
    assert main([*command, *arguments]) == 1
    error = capsys.readouterr().err.strip()
    assert message in error and error.count("\n") == 0


def test_a_part_must_be_a_share(work: Path, tmp_path: Path, capsys: Any) -> None:
    for part in ("2/2", "x", "1", "-1/2"):
        command = ["generate", "--model", str(work / "model"), "--prompts", str(work / "prompts.jsonl"), "--out", str(tmp_path), "--device"]
        assert main([*command, "cpu", "--max-model-len", "64", "--part=" + part]) == 1
        assert "part must be I/N" in capsys.readouterr().err

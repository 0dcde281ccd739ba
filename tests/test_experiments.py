"""The experiments on a tiny target: noise given its winner, targets that move, and what is recorded of them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from bench import schema
from bench.experiments import noise_share, stale_draft
from bench.experiments.moved import fine_tuned, perturbed, shouted
from specdec.errors import ConfigError
from specdec.models.head_fingerprint import measure
from specdec.models.load import load_model
from specdec.train.data import Answer, make_corpus
from specdec.train.generate import open_target
from specdec.train.prompts import Prompt
from tests.harness import checkpoint
from tests.spec.heads import knowing_head, random_head, target
from tests.tiny_heads import tiny_head, write_head


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records go; one short prompt of one domain."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "qa.jsonl").write_text(json.dumps({"turns": ["a b c"]}), encoding="utf-8")
    for module in (schema, stale_draft):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(schema, "commit", lambda: "abc")
    return tmp_path / "results"


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_noise_given_the_winner_makes_it_win_and_is_gumbel_without_knowing_it() -> None:
    """Winners drawn from the law, then noise drawn given them: together that is plain noise, mean γ and variance π²/6."""
    generator = torch.Generator().manual_seed(0)
    log_p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log().expand(20_000, 5)
    chosen = torch.multinomial(log_p.exp(), 1, generator=generator)[:, 0]
    noise = noise_share.posterior_noise(log_p, chosen, generator)
    assert torch.equal((log_p + noise).argmax(-1), chosen)
    possible = noise[:, :4]
    torch.testing.assert_close(possible.mean(0), torch.full((4,), 0.5772, dtype=torch.float64), rtol=0, atol=0.04)
    torch.testing.assert_close(possible.var(0), torch.full((4,), torch.pi**2 / 6, dtype=torch.float64), rtol=0.06, atol=0)
    assert float(torch.corrcoef(possible.T)[0, 1].abs()) < 0.03


def test_a_head_that_knows_the_law_wants_all_of_the_noise(records: Path) -> None:
    given = ["--model", checkpoint("last"), "--heads", f"eagle3={knowing_head()}", "--domains", "qa", "--prompts", "1"]
    noise_share.main([*given, "--max-tokens", "60", "--depths", "2"])  # it sees one row only: a deeper chain would see its own
    rows = {(r["share"], r["width"]): r for r in lines(records / "noise_share.jsonl")[0]["rows"]}
    assert rows[1.0, 1]["conditional"] == [1.0, 1.0] and rows[1.0, 1]["length"] > 2.9
    noise_share.main([*given, "--max-tokens", "40", "--redraw", "2"])
    again = lines(records / "noise_share.jsonl")[1]
    assert again["depths"] == 1 and {r["share"]: r["length"] for r in again["rows"] if r["width"] == 1}[1.0] == 2.0
    assert rows[0.0, 1]["conditional"][0] < 0.9 and rows[0.0, 8]["length"] >= rows[0.0, 1]["length"]


def test_noise_on_weights_has_the_size_asked_for() -> None:
    base = load_model(checkpoint())
    still, moved = perturbed(base, 0.0), perturbed(base, 0.05)
    for name in ("qkv", "out"):
        before = getattr(base.model.layers[0].attention, name).dequantize()
        difference = getattr(moved.model.layers[0].attention, name).dequantize() - before
        assert torch.equal(getattr(still.model.layers[0].attention, name).dequantize(), before)
        size = float(difference.square().mean().sqrt() / before.square().mean().sqrt())
        assert 0.045 < size < 0.055
    assert moved.fingerprint != still.fingerprint


def test_fine_tuning_learns_the_capitals_and_writes_checkpoints(tmp_path: Path) -> None:
    llm = open_target(checkpoint(), device="cpu", max_num_seqs=2)
    texts = shouted(llm, [Prompt(f"p{i}", "ab"[i % 2], (f"a b {i}",)) for i in range(4)], 12)
    assert len(texts) == 4 and texts.domains == ("a", "b", "a", "b") and bool((texts.lengths > texts.prompt_len).all())
    found = []
    for step, loss, directory in fine_tuned(checkpoint(), texts, [0, 4, 24], tmp_path, lr=1e-2):
        found.append((step, loss, load_model(directory).fingerprint))
    assert [step for step, _, _ in found] == [0, 4, 24] and found[0][1] == 0.0 and found[2][1] < 0.8 * found[1][1]
    assert len({fingerprint for _, _, fingerprint in found}) == 3
    assert not list(tmp_path.glob("step-*"))
    with pytest.raises(ConfigError, match="rising"):
        next(fine_tuned(checkpoint(), texts, [4, 2], tmp_path))


def marked_head(folder: Path) -> str:
    """A random head with its target's fingerprint."""
    config, tensors = tiny_head("eagle3", target().config, taps=(0, 1, 2))
    return str(write_head(folder, "speculators", config, tensors, fingerprint=measure(target().model, config.taps)))


def test_a_point_for_every_move(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The unmoved target is trusted and unchanged; a large move is refused by the check, and drafted for all the same."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": f"p{i}", "domain": "qa", "turns": [f"a b {i}"]}) for i in range(3)))
    given = ["--model", checkpoint(), "--head", f"eagle3={marked_head(tmp_path / 'head')}", "--domains", "qa", "--max-tokens", "30"]
    given += ["--shape", "chain:2", "--noise", "0", "0.02", "2", "--steps", "0", "2", "--train-prompts", str(prompts)]
    stale_draft.main([*given, "--train-tokens", "8", "--lr", "1e-2"])
    rows = lines(records / "stale_draft.jsonl")
    assert [(r["cause"], r["amount"]) for r in rows] == [("noise", 0.0), ("noise", 0.02), ("noise", 2.0), ("steps", 0), ("steps", 2)]
    still, near, far, start, tuned = rows
    for same in (still, start):
        assert same["trusted"] and same["agreement"] == 1.0 and same["perplexity_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert min(same["correlations"]) > 0.999
    assert near["trusted"] and not far["trusted"] and "correlation" in far["reason"] and far["agreement"] < near["agreement"] < 1.0
    assert far["drafted_per_step"] > 1.5 and len(far["domains"]["qa"]["committed"]) == far["steps"]
    assert all(0.0 <= r["first_draft"] <= 1.0 for r in rows)
    assert tuned["perplexity_ratio"] > 1.1 and tuned["loss"] > 0 and 0.0 <= tuned["covered"] <= 1.0
    picture = ElementTree.parse(records / "stale_draft.svg")
    assert len(picture.findall(".//{*}polyline")) == 10
    assert "refused: " in capsys.readouterr().out


def test_the_first_draft_of_a_head_that_knows_the_target_is_its_likeliest_token() -> None:
    loaded, source = load_model(checkpoint("last")), knowing_head()
    texts = make_corpus([Answer(list(range(30 + i, 70 + i)), 8, 0.0, True, str(i), "qa") for i in range(3)])
    before = stale_draft.Reading.of(loaded, texts, source)
    found = before.against(before)
    assert found["first_draft"] == found["agreement"] == found["perplexity_ratio"] == 1.0 and len(before.top) == 3 * 32
    far = stale_draft.Reading.of(perturbed(loaded, 1.0), texts, source).against(before)
    assert far["agreement"] < 1.0 and far["first_draft"] < 1.0 and far["perplexity_ratio"] != 1.0


def test_a_head_without_a_fingerprint_says_nothing_of_a_move(records: Path) -> None:
    with pytest.raises(ConfigError, match="no fingerprint"):
        stale_draft.main(["--model", checkpoint(), "--head", f"eagle3={random_head()}", "--domains", "qa", "--noise", "0"])
    with pytest.raises(ConfigError, match="--train-prompts"):
        stale_draft.main(["--head", "eagle3=x", "--steps", "0", "1"])

"""The dense target of training is the served model: same taps, same final states, same law."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.errors import ConfigError
from specdec.models.load import load_model
from specdec.train.capture import DenseTarget, FeatureStore, Online
from specdec.train.data import Answer, epoch, make_corpus
from tests.oracle import PlainKV
from tests.tiny import write_tiny

LENGTHS = (37, 20, 1)
VARIANTS: dict[str, dict[str, Any]] = {
    "t0": {},
    "tied": {"tied": True},
    "window and biases": {"two_groups": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def ids(length: int, seed: int) -> list[int]:
    return [(7 * i * i + 13 * i + seed) % 512 for i in range(length)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_served_model(variant: str, tmp_path: Any) -> None:
    model = load_model(write_tiny(tmp_path, **VARIANTS[variant])).model
    texts = [ids(n, seed) for seed, n in enumerate(LENGTHS)]
    tokens = torch.zeros(len(texts), max(LENGTHS), dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    got = DenseTarget(model, (2, 0, 1)).capture(tokens, rows=10)
    for row, text in enumerate(texts):
        kv = PlainKV(model.config, len(text))
        with torch.inference_mode():
            hidden, taps = model.forward(kv.batch(text), kv, taps=(2, 0, 1))
            logits = model.logits(hidden)
        n = len(text)
        assert taps is not None
        torch.testing.assert_close(got.taps[row, :n], taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.hidden[row, :n], hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.log_z[row, :n], logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert got.top[row, :n].tolist() == logits.argmax(-1).tolist()


def test_stored_features_are_the_online_ones(tmp_path: Any) -> None:
    target = DenseTarget(load_model(write_tiny(tmp_path)).model, (0, 2))
    corpus = make_corpus([Answer(ids(n, n), 3, 0.0, True, f"p{n}", "x") for n in (9, 140, 31, 64, 12)])
    stored, online = FeatureStore(target, corpus, max_tokens=160), Online(target)
    for batch in epoch(corpus, 300, 0, 0):
        real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        a, b = stored(batch), online(batch)
        for name in ("taps", "hidden", "log_z", "top"):
            torch.testing.assert_close(getattr(a, name)[real], getattr(b, name)[real], rtol=1e-4, atol=1e-4)


def test_a_tap_outside_the_target_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"taps \(3,\).*\[0, 2\]"):
        DenseTarget(load_model(write_tiny(tmp_path)).model, (3,))

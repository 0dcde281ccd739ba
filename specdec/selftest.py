"""`specdec verify`: does speculation change the output of this model on this machine? Tells near-ties from bugs.

Each prompt is decoded with speculation off, with it on, and, as a control, off again in one batch with all the others. Where a
run first differs from the first one, the rows of both tokens are looked at: a margin below 6σ of the model's own rounding
noise is a tie, anything else is a bug. σ: standard deviation of logits between a row computed alone and inside a prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.config import SamplingParams

if TYPE_CHECKING:
    from specdec.llm import LLM

PROMPTS = (
    "List the first ten prime numbers and explain what a prime is.",
    "Copy this line three times: The ship left at 08:15 with 240 crates on board.",
    "Write a Python function that reverses a linked list.",
    "Explain in simple words why the sky is blue.",
    "Translate to German: The meeting has been moved to Thursday afternoon.",
    "Summarize: A town of 1,200 people built a bridge over its river. It took two years and cost less than planned.",
    "Write a short story about a lighthouse keeper and a lost letter.",
    "Turn this into JSON: name Ada, age 36, city London.",
)


@dataclass(frozen=True, slots=True)
class Divergence:
    """First difference of two runs: output index, both tokens, and the logit margin between them in the reference run."""

    index: int
    expected: int
    found: int
    margin: float


def first_divergence(llm: LLM, prompt: list[int], expected: list[int], found: list[int]) -> Divergence | None:
    """Where `found` leaves `expected`, or None when they are equal. Greedy runs only: the margin is taken on raw logits."""
    for i, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            own, other = (_logprob(llm, [*prompt, *expected[:i]], token) for token in (a, b))
            return Divergence(i, a, b, own - other)
    if len(expected) != len(found):
        at = min(len(expected), len(found))
        a, b = (run[at] if at < len(run) else -1 for run in (expected, found))
        return Divergence(at, a, b, float("inf"))
    return None


def _logprob(llm: LLM, ids: list[int], token: int) -> float:
    """Raw log-probability of `token` after `ids`, as a prompt log-probability (a row of a prefill)."""
    out = llm.generate([[*ids, token]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
    assert out.prompt_logprobs is not None and out.prompt_logprobs[-1] is not None
    return out.prompt_logprobs[-1].logprob


def rounding_noise(llm: LLM, prompt: list[int], output: list[int], logprobs: list[float]) -> float:
    """σ: root mean square difference of the output's log-probabilities between decoding and one prefill."""
    out = llm.generate([prompt + output], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
    assert out.prompt_logprobs is not None
    again = [entry.logprob for entry in out.prompt_logprobs[len(prompt) :] if entry is not None]
    return (sum((a - b) ** 2 for a, b in zip(again, logprobs, strict=True)) / max(len(again), 1)) ** 0.5


def run(model: str, *, speculation: str, device: str, deterministic: bool, max_tokens: int, num_prompts: int) -> int:
    """Print a table and a verdict; 0 when every difference is a near-tie, 1 otherwise."""
    from specdec.llm import LLM

    off = LLM(model, speculation="off", device=device, deterministic=deterministic)
    on = LLM(model, speculation=speculation, device=device, deterministic=deterministic)
    texts = [PROMPTS[i % len(PROMPTS)] for i in range(num_prompts)]
    prompts = [off.tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True) for t in texts]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0)
    reference = [off.generate([p], params)[0].outputs[0] for p in prompts]
    drafting = [on.generate([p], params)[0] for p in prompts]
    runs = {
        speculation: [o.outputs[0].token_ids for o in drafting],
        "off, batched": [o.outputs[0].token_ids for o in off.generate(list(prompts), params)],
    }
    noise = [rounding_noise(off, p, r.token_ids, [e.logprob for e in r.logprobs or []]) for p, r in zip(prompts, reference, strict=True)]
    sigma = max(noise)
    total = sum(len(r.token_ids) for r in reference)
    print(f"{len(prompts)} prompts, {total} tokens; rounding noise of a log-probability: {sigma:.2e}")
    drafted, accepted = (sum(getattr(o.metrics, name) for o in drafting) for name in ("drafted", "accepted"))
    print(f"{speculation}: {drafted} tokens drafted, {accepted} accepted" + ("" if drafted else "; nothing was put to the test"))
    bugs = 0
    for name, outputs in runs.items():
        found = [first_divergence(off, p, r.token_ids, o) for p, r, o in zip(prompts, reference, outputs, strict=True)]
        different = [d for d in found if d is not None]
        bad = [d for d in different if abs(d.margin) > 6 * sigma]
        bugs += len(bad)
        rate, ties = 1000 * len(different) / max(total, 1), len(different) - len(bad)
        print(f"{name:>14s}: {rate:.2f} divergences per 1,000 tokens, {ties} near-ties, {len(bad)} bugs")
        for d in different:
            print(f"    output token {d.index}: {d.expected} became {d.found}, margin {d.margin:.2e} ({'bug' if d in bad else 'near-tie'})")
    print("speculation does not change the output" if not bugs else "DIFFERENCES THAT ROUNDING CANNOT EXPLAIN")
    return int(bugs > 0)

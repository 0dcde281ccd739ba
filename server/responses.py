"""Response bodies: ids, usage, and log-probabilities in the shapes of chat and text completions."""

from __future__ import annotations

import codecs
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.types import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs

Json = dict[str, Any]


@dataclass(slots=True)
class Header:
    """What every body of one response repeats."""

    kind: str  # "chat.completion" | "text_completion"
    model: str
    fingerprint: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id or f"{'chatcmpl' if self.kind == 'chat.completion' else 'cmpl'}-{uuid.uuid4().hex}"

    def body(self, choices: list[Json], *, chunk: bool = False) -> Json:
        """A response, or one chunk of a stream; the text completion object keeps its name in streams."""
        kind = "chat.completion.chunk" if chunk and self.kind == "chat.completion" else self.kind
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request over all its prompts, from the deltas handed out and the latest metrics.

    `scores_only`: the generated tokens were computed only to score the prompt and are not handed out.
    """

    scores_only: bool = False
    completion: dict[str, int] = field(default_factory=dict)  # request id -> tokens handed out
    latest: dict[str, RequestMetrics] = field(default_factory=dict)
    prompt: dict[str, int] = field(default_factory=dict)

    def add(self, output: RequestOutput) -> None:
        """Count one delta."""
        key = output.request_id
        self.completion[key] = self.completion.get(key, 0) + sum(len(c.token_ids) for c in output.outputs)
        self.latest[key] = output.metrics
        self.prompt[key] = len(output.prompt_token_ids)

    def json(self) -> Json:
        """OpenAI `usage`. accepted/rejected prediction tokens are the accepted/rejected draft tokens, whatever drafted them."""
        prompt = sum(self.prompt.values())
        completion = 0 if self.scores_only else sum(self.completion.values())
        drafted = sum(m.drafted for m in self.latest.values())
        accepted = sum(m.accepted for m in self.latest.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(m.cached_tokens for m in self.latest.values())},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
                "reasoning_tokens": 0,
            },
        }


class Vocabulary(Protocol):
    """What a tokenizer knows of single tokens."""

    def token_text(self, token: int) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...


def chat_logprobs(entries: list[TokenLogprobs] | None, vocabulary: Vocabulary) -> Json | None:
    """`choices[].logprobs` of chat completions; None when they were not asked for."""
    if entries is None:
        return None

    def one(token: int, logprob: float) -> Json:
        return {"token": vocabulary.token_text(token), "logprob": finite(logprob), "bytes": list(vocabulary.token_bytes(token))}

    return {"content": [one(e.token, e.logprob) | {"top_logprobs": [one(*top) for top in e.top]} for e in entries]}


class Offsets:
    """Where each token of a choice begins in its text, in characters, delta by delta.

    Counted from the tokens, not from what was sent: text may be held back for a stop string, and a character split over
    tokens (and deltas) counts where it becomes complete.
    """

    def __init__(self, vocabulary: Vocabulary, start: int = 0):
        self._vocabulary, self._next = vocabulary, start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, ids: list[int | None]) -> list[int]:
        """Offsets of the next tokens; None is a token without text."""
        offsets = []
        for token in ids:
            offsets.append(self._next)
            self._next += 0 if token is None else len(self._decoder.decode(self._vocabulary.token_bytes(token)))
        return offsets


def completion_logprobs(
    entries: list[TokenLogprobs | None] | None, offsets: Offsets, vocabulary: Vocabulary, first: int | None = None
) -> Json | None:
    """`choices[].logprobs` of text completions. `offsets` has seen the tokens of the choice before these.

    `first` is the token of a leading entry without a law: the first token of an echoed prompt.
    """
    if entries is None:
        return None
    ids = [first if entry is None else entry.token for entry in entries]
    return {
        "tokens": ["" if token is None else _shown(token, vocabulary) for token in ids],
        "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
        "top_logprobs": [
            None if e is None else {_shown(t, vocabulary): finite(lp) for t, lp in (*e.top, (e.token, e.logprob))} for e in entries
        ],
        "text_offset": offsets.of(ids),
    }


def _shown(token: int, vocabulary: Vocabulary) -> str:
    """The token's text, or `bytes:\\xNN…` for a part of a character, so that different tokens never look alike."""
    raw = vocabulary.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(entries: list[TokenLogprobs | None] | None, vocabulary: Vocabulary) -> list[Json | None] | None:
    """vLLM's `prompt_logprobs`: per prompt token a map from token id to its log-probability, null for the first."""
    if entries is None:
        return None
    result: list[Json | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranked = {token: (logprob, i + 1) for i, (token, logprob) in enumerate(entry.top)} | {entry.token: (entry.logprob, entry.rank)}
        facts = {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": vocabulary.token_text(token)}
            for token, (logprob, rank) in ranked.items()
        }
        result.append(facts)
    return result


def finite(logprob: float) -> float:
    """JSON has no -inf: a masked token reports -9999, as the OpenAI interface does."""
    return max(logprob, -9999.0)


def join(deltas: list[RequestOutput]) -> list[CompletionOutput]:
    """Whole choices of one request out of its deltas, by index."""
    whole: dict[int, CompletionOutput] = {}
    texts: dict[int, list[str]] = {}
    for delta in deltas:
        for new in delta.outputs:
            old = whole.setdefault(new.index, CompletionOutput(new.index, logprobs=None if new.logprobs is None else []))
            texts.setdefault(new.index, []).append(new.text)
            old.token_ids.extend(new.token_ids)
            if old.logprobs is not None:
                old.logprobs.extend(new.logprobs or ())
            old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
    for index, choice in whole.items():
        choice.text = "".join(texts[index])
    return [whole[i] for i in sorted(whole)]

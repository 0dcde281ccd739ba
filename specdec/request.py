"""`RequestState`: one admitted request, its choices, their text, and what has not been handed out yet."""

from __future__ import annotations

import secrets
from operator import index
from typing import TYPE_CHECKING, Any

from specdec.check import shown
from specdec.config import METHODS, TEST_METHODS, SamplingParams, forbids
from specdec.errors import InvalidRequest, RequestTooLong
from specdec.output import OutputText
from specdec.sequence import Sequence
from specdec.types import NOTHING_ALLOWED, STUCK, CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from specdec.tokenizer import Tokenizer

_OVERRIDES = ("method", "nodes", "depth", "width")
_FORBID = {  # field -> how it forbids tokens from the start
    "bad_words": "a bad word of one token is never allowed",
    "min_tokens": "end tokens are not allowed before min_tokens",
    "logit_bias": "a bias of -100 forbids a token",
}


def token_ids(prompt: Any) -> list[int]:
    """A prompt given as token ids, as plain ints (NumPy's are welcome). InvalidRequest for anything but a sequence of integers."""
    try:
        if isinstance(prompt, (bytes, bytearray, dict, set, frozenset)) or any(isinstance(i, bool) for i in prompt):
            raise TypeError
        return [index(i) for i in prompt]
    except TypeError:
        raise InvalidRequest(f"a prompt is text or a list of integer token ids, got {prompt!r:.80}", param="prompt") from None


def check_prompt(prompt: list[int], params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Refuse what can never be served: empty or too long prompts, token ids outside [0, vocab_size)."""
    if not prompt:
        raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
    if len(prompt) >= max_model_len:
        raise RequestTooLong(
            f"the prompt has {len(prompt)} tokens but the context holds {max_model_len} including the output; shorten it", param="prompt"
        )
    named = {"prompt": prompt, "stop_token_ids": params.stop_token_ids, "allowed_token_ids": params.allowed_token_ids}
    named |= {"logit_bias": list(params.logit_bias or ()), "prediction": () if isinstance(params.prediction, str) else params.prediction}
    for name, ids in named.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            raise InvalidRequest(f"{name}: token id {shown(bad)} is outside the vocabulary [0, {vocab_size})", param=name)


def check_override(override: dict[str, Any] | None, methods: tuple[str, ...]) -> None:
    """Refuse a per-request `speculation` that names unknown fields, or a drafter this engine does not have."""
    if override is None:
        return
    if not isinstance(override, dict):
        raise InvalidRequest("speculation must be an object like {'method': 'off'}", param="speculation")
    unknown = sorted(set(override) - set(_OVERRIDES))
    if unknown:
        raise InvalidRequest(f"speculation: unknown field {unknown[0]!r}; allowed: {', '.join(_OVERRIDES)}", param="speculation")
    method = override.get("method")
    allowed = ("auto", "off", *methods)
    if method is not None and method not in allowed:
        known = method in METHODS + TEST_METHODS
        why = "is not loaded in this engine" if known else "is unknown"
        raise InvalidRequest(f"speculation method {method!r} {why}; allowed: {', '.join(allowed)}", param="speculation.method")
    for name in ("nodes", "depth", "width"):
        value = override.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64):
            raise InvalidRequest(f"speculation.{name} must be an integer in [1, 64], got {shown(value)}", param=f"speculation.{name}")


def check_start(params: SamplingParams, bad_words: list[list[int]], end_ids: frozenset[int], vocab_size: int) -> None:
    """Refuse rules that leave no token to begin with. bad_words: token sequences; those of one token are never allowed.

    Whether rules that do leave one leave another after it depends on the output: see `SamplingParams`.
    """
    banned = {
        "bad_words": {word[0] for word in bad_words if len(word) == 1},
        "min_tokens": set(end_ids) if params.min_tokens else set(),
        "logit_bias": {token for token, bias in (params.logit_bias or {}).items() if forbids(bias)},
    }
    together = set().union(*banned.values())
    allowed = params.allowed_token_ids
    if len(together) < vocab_size if allowed is None else not together.issuperset(allowed):
        return
    guilty = {name for name, ids in banned.items() if (ids if allowed is None else ids.intersection(allowed))}
    names = ["allowed_token_ids"] * (allowed is not None) + [name for name in banned if name in guilty]
    why = "; ".join(text for name, text in _FORBID.items() if name in guilty)
    raise InvalidRequest(f"{' and '.join(names)} leave no token to begin with ({why}); relax one of them", param=names[0])


def _bad_words(params: SamplingParams, tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences of the bad words: as a word of its own and inside text (with and without a leading space)."""
    texts = [text for word in params.bad_words or () for text in {word, " " + word.lstrip()}]
    return [ids for text in texts if (ids := tokenizer.encode(text, add_special=False))]


class RequestState:
    """Choices of one request. `sequences[i]` and `texts[i]` belong to choice i; deltas collect until `take`."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        arrival: float,
        max_model_len: int,
        eos_ids: frozenset[int],
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.bad_words = _bad_words(params, tokenizer)
        self.trace: Any = None
        self.aborted = False
        self.sequences = self._choices(arrival, max_model_len, eos_ids, tokenizer)
        self.texts = [OutputText(tokenizer, prompt_ids, params) for _ in self.sequences]
        self._tokens: list[list[int]] = [[] for _ in self.sequences]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in self.sequences]
        self._told_finished = [False] * len(self.sequences)

    def _choices(self, arrival: float, max_model_len: int, eos_ids: frozenset[int], tokenizer: Tokenizer) -> list[Sequence]:
        params = self.params
        seed = (secrets.randbits(64) if params.seed is None else params.seed) & (2**64 - 1)
        limit = max_model_len if params.max_tokens is None else min(max_model_len, len(self.prompt_ids) + params.max_tokens)
        ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_ids)
        prediction = params.prediction or ()
        if isinstance(prediction, str):
            prediction = tokenizer.encode(prediction, add_special=False)
        sequences: list[Sequence] = []
        for choice in range(params.n):
            metrics = RequestMetrics(arrival=arrival, prompt_tokens=len(self.prompt_ids))
            sequences.append(
                Sequence(
                    request_id=self.request_id,
                    tokens=list(self.prompt_ids),
                    num_prompt=len(self.prompt_ids),
                    params=params,
                    seed=seed,
                    max_total=limit,
                    choice=choice,
                    end_ids=ends,
                    arrival=arrival,
                    fork_of=sequences[0] if choice else None,
                    metrics=metrics,
                    prediction=tuple(prediction),
                )
            )
        return sequences

    @property
    def finished(self) -> bool:
        return all(s.finished for s in self.sequences)

    def feed(self, choice: int, run: list[int], finish: int, logprobs: tuple[TokenLogprobs, ...] | None) -> list[int]:
        """Take one committed run (`finish` as in `Verdict`), token by token.

        Returns the tokens kept: a stop string cuts the run at the token that completes it. Sets the finish reason on
        the sequence; its status is the scheduler's business.
        """
        seq, text = self.sequences[choice], self.texts[choice]
        kept, stopped = len(run), False
        for i, token in enumerate(run):
            if text.push(token, ends=finish == 1 and i == len(run) - 1):
                kept, stopped = i + 1, True
                break
        if stopped or (finish and text.close()):
            seq.finish_reason, seq.stop_reason = "stop", text.stop_string
        elif finish == 1:
            seq.finish_reason = "stop"
            last = run[kept - 1]
            seq.stop_reason = last if last in (self.params.stop_token_ids or ()) else None
        elif finish == 2:
            seq.finish_reason = "length"
        elif finish == STUCK:
            seq.finish_reason, seq.stop_reason = "stop", NOTHING_ALLOWED
        self._tokens[choice].extend(run[:kept])
        if logprobs is not None:
            self._logprobs[choice].extend(logprobs[:kept])
        return run[:kept]

    def add_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Entries of the prompt positions from `start` on; those computed again after a preemption are known already."""
        known = self.prompt_logprobs
        assert known is not None
        known.extend(entries[max(len(known) - start, 0) :])

    def abort(self) -> None:
        """Mark every unfinished choice as aborted and release its text."""
        self.aborted = True
        for seq, text in zip(self.sequences, self.texts, strict=True):
            if seq.finish_reason is None:
                seq.finish_reason = "abort"
                text.close()

    def take(self) -> RequestOutput | None:
        """The delta since the last call, or None when nothing changed that a client could see."""
        outputs = []
        for i, seq in enumerate(self.sequences):
            text, done = self.texts[i].take(), seq.finish_reason is not None
            if not text and not self._tokens[i] and (not done or self._told_finished[i]):
                continue
            self._told_finished[i] = done
            outputs.append(
                CompletionOutput(
                    index=i,
                    text=text,
                    token_ids=self._tokens[i],
                    finish_reason=seq.finish_reason,
                    stop_reason=seq.stop_reason,
                    logprobs=self._logprobs[i] if self.params.logprobs is not None else None,
                )
            )
            self._tokens[i], self._logprobs[i] = [], []
        finished = all(self._told_finished)
        if not outputs:
            return None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=outputs,
            finished=finished,
            metrics=self._metrics(),
            prompt_logprobs=self.prompt_logprobs,
            trace=self.trace,
        )

    def _metrics(self) -> RequestMetrics:
        """Sums over the choices; times are the earliest start and the latest end."""
        each = [s.metrics for s in self.sequences]
        total = RequestMetrics(arrival=each[0].arrival, prompt_tokens=len(self.prompt_ids), cached_tokens=each[0].cached_tokens)
        total.first_scheduled = min((m.first_scheduled for m in each if m.first_scheduled is not None), default=None)
        total.first_token = min((m.first_token for m in each if m.first_token is not None), default=None)
        if self.finished or self.aborted:
            total.finished = max((m.finished for m in each if m.finished is not None), default=None)
        for name in ("generated", "steps", "drafted", "accepted", "preemptions"):
            setattr(total, name, sum(getattr(m, name) for m in each))
        return total

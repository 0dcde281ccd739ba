"""A fake engine with the interface of `specdec.engine.Engine`: deterministic tokens, a settable step time, no model.

Token i of choice c after prompt p is `(sum(p) + 31 * i + 101 * c + seed) % 26`, shown as one letter a…z. Every second step of
a sequence pretends that a draft of two tokens was verified and one of them accepted, so steps yield one or two tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.errors import InvalidRequest, RequestTooLong
from specdec.spec.watch import DrafterHealth
from specdec.types import CompletionOutput, RequestMetrics, RequestOutput, StepStats, TokenLogprobs

VOCAB = 512


class FakeTokenizer:
    """One character = one token (its code point, up to 511); ids 0…25 are the letters a…z."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [ord(c) - 97 if "a" <= c <= "z" else min(ord(c), VOCAB - 1) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i) if i < 26 else chr(i) for i in ids)

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))


@dataclass(eq=False)
class _Running:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    produced: list[list[int]] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)


class FakeEngine:
    """See the module. `step_seconds` is slept in every step; `gate` is called at the start of every step."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        max_model_len: int = 4096,
        step_seconds: float = 0.0,
        gate: Callable[[], None] = lambda: None,
    ):
        self.config = config or EngineConfig(model="fake", speculation=SpecConfig(method="ngram"))
        self.model_name, self.quantization = "fake", None
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB
        self.tokenizer = FakeTokenizer()
        self.runner = SimpleNamespace(device="cpu", model=SimpleNamespace(dtype="torch.float32"))
        self.kv = SimpleNamespace(dtype="torch.bfloat16")
        self.heads = None
        self.observers: list[Callable[[StepStats], None]] = []
        self.step_seconds = step_seconds
        self.gate = gate
        self.aborted: list[str] = []
        self.steps = 0
        self.closed = False
        self.kv_usage = 0.25
        self.prefix_queries = self.prefix_hits = self.preemptions = 0
        self.drafter_health = DrafterHealth({"ngram": 2}, {"ngram": True, "suffix": False}, head_swaps=3, head_rollbacks=1)
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._ended: list[RequestOutput] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def oldest_wait_seconds(self) -> float:
        return time.monotonic() - self._waiting[0].metrics.arrival if self._waiting else 0.0

    def add_request(self, request_id: str, prompt: str | list[int], params: SamplingParams, *, arrival: float | None = None) -> None:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if len(ids) >= self.max_model_len:
            raise RequestTooLong(f"{len(ids)} tokens do not fit {self.max_model_len}", param="prompt")
        if not 0 <= min(ids) <= max(ids) < VOCAB:
            raise InvalidRequest("token id outside the vocabulary", param="prompt")
        override = params.speculation or {}
        if unknown := set(override) - {"method", "nodes", "depth", "width"}:
            raise InvalidRequest(f"speculation: unknown {sorted(unknown)}; allowed: method, nodes, depth, width", param="speculation")
        if override.get("method", "off") not in ("off", "auto", "ngram"):
            raise InvalidRequest("speculation.method is unknown; allowed: off, auto, ngram", param="speculation.method")
        metrics = RequestMetrics(arrival=time.monotonic() if arrival is None else arrival, prompt_tokens=len(ids))
        n = params.n
        self._waiting.append(_Running(request_id, ids, params, metrics, [[] for _ in range(n)], [None] * n))
        self.prefix_queries += len(ids)

    def abort(self, request_id: str) -> None:
        for group in (self._waiting, self._running):
            for request in [r for r in group if r.request_id == request_id]:
                group.remove(request)
                self.aborted.append(request_id)
                choices = [CompletionOutput(i, finish_reason="abort") for i in range(request.params.n)]
                self._ended.append(RequestOutput(request_id, None, request.prompt, choices, True, request.metrics))

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def step(self) -> list[RequestOutput]:
        self.gate()
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.popleft()
            request.metrics.first_scheduled = time.monotonic()
            self._running.append(request)
        if self._running:
            time.sleep(self.step_seconds)
        outputs, self._ended = self._ended, []
        stats = StepStats(self.steps, len(self._running), len(self._running), len(self._running), 0)
        outputs += [self._advance(request, stats) for request in list(self._running)]
        self.steps += 1
        for observer in self.observers:
            observer(stats)
        return outputs

    def close(self) -> None:
        self.closed = True

    def _advance(self, request: _Running, stats: StepStats) -> RequestOutput:
        metrics = request.metrics
        drafts = request.metrics.steps % 2 == 1 and (request.params.speculation or {}).get("method") != "off"
        metrics.steps += 1
        choices = []
        for c, produced in enumerate(request.produced):
            if request.reasons[c] is None:
                choices.append(self._extend(request, c, produced, 2 if drafts else 1))
        if drafts:
            for name, amount in (("drafts", 1), ("drafted", 2), ("accepted", 1)):
                getattr(stats, name)["ngram"] = getattr(stats, name).get("ngram", 0) + amount
            stats.accepted_position["ngram"] = [stats.accepted["ngram"]]
            metrics.drafted += 2
            metrics.accepted += 1
        done = all(request.reasons)
        if done:
            self._running.remove(request)
            metrics.finished = time.monotonic()
        scores = self._prompt_logprobs(request)
        return RequestOutput(request.request_id, None, request.prompt, choices, done, metrics, scores)

    def _extend(self, request: _Running, c: int, produced: list[int], count: int) -> CompletionOutput:
        params = request.params
        limit = self.max_model_len - len(request.prompt)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        new = []
        base = sum(request.prompt) + 101 * c + (params.seed or 0)
        while len(new) < count and request.reasons[c] is None:
            token = (base + 31 * len(produced)) % 26
            produced.append(token)
            new.append(token)
            if token in (params.stop_token_ids or ()):
                request.reasons[c] = "stop"
            elif len(produced) >= limit:
                request.reasons[c] = "length"
        request.metrics.generated += len(new)
        request.metrics.first_token = request.metrics.first_token or time.monotonic()
        stopped = new[-1] if request.reasons[c] == "stop" else None
        text = self.tokenizer.decode(new[:-1] if stopped is not None and not params.include_stop_str_in_output else new)
        logprobs = None if params.logprobs is None else [_logprobs(t, params.logprobs) for t in new]
        return CompletionOutput(c, text, new, request.reasons[c], stopped, logprobs)

    @staticmethod
    def _prompt_logprobs(request: _Running) -> list[TokenLogprobs | None] | None:
        wanted = request.params.prompt_logprobs
        return None if wanted is None else [None, *(_logprobs(t, wanted) for t in request.prompt[1:])]


def _logprobs(token: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, tuple(((token + i) % VOCAB, -0.5 - i) for i in range(top)))

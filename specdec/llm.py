"""`LLM`: the offline API. Names follow vLLM's where the meaning is the same."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from specdec.boot import build_engine
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.errors import ConfigError, InvalidRequest
from specdec.types import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from specdec.engine import Engine
    from specdec.live_heads import HeadInfo

Prompt = str | Sequence[int]  # NumPy arrays and tensors of one dimension count as sequences of ids
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model ready to generate. `model`: a known name, a directory, a `.gguf` file or a hub id.

    Keyword arguments are the fields of `EngineConfig`; `speculation` is a method name or a `SpecConfig`.
    Threads may call it at once: whoever waits makes a step for all, and every call gets its own outputs.
    """

    def __init__(
        self, model: str = "smollm2-135m-instruct", *, speculation: str | dict[str, Any] | SpecConfig | None = "auto", **options: Any
    ):
        known = [f.name for f in dataclasses.fields(EngineConfig)]
        for name in options:
            if name not in known:
                raise ConfigError(f"LLM has no argument {name!r}; known: {', '.join(known)}", param=name)
        config = EngineConfig(model=model, speculation=SpecConfig.of(speculation), **options)
        self.engine: Engine = build_engine(config)
        self._ids = itertools.count()
        self._inbox: dict[str, list[RequestOutput]] = {}  # of open calls: outputs that their own next look will find
        self._dropped: list[str] = []  # abandoned while a step was under way
        self._lock, self._next = threading.RLock(), threading.RLock()
        self._owner: int | None = None  # thread inside the engine
        self._stepping = False

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many (str, token ids, or lists of them). Outputs come in the order of the prompts."""
        many = _as_list(prompts)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(many)
        if len(each) != len(many):
            raise InvalidRequest(f"{len(many)} prompts but {len(each)} sampling parameters; give one each, or one for all", param="params")
        ids: list[str] = []
        try:
            with self._alone():
                for prompt, one in zip(many, each, strict=True):
                    ids.append(self._add(prompt, one, trace))
            done = self._run(ids, use_tqdm)
        except BaseException:
            self._abandon(ids)
            raise
        return [done[request_id] for request_id in ids]

    def chat(
        self, messages: Messages | Sequence[Messages], params: SamplingParams | Sequence[SamplingParams] | None = None, **options: Any
    ) -> list[RequestOutput]:
        """Complete one conversation or many through the model's chat template. Content is text or a list of text parts."""
        if not isinstance(messages, (list, tuple)) or not messages:
            raise InvalidRequest(
                "messages must be a non-empty list of {'role': ..., 'content': ...}, or a list of such lists", param="messages"
            )
        many = [messages] if isinstance(messages[0], Mapping) else messages
        ids = [self.tokenizer.apply_chat_template(_plain(m), add_generation_prompt=True) for m in many]
        return self.generate(ids, params, **options)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, trace: bool = False) -> Stream:
        """Deltas of one prompt as they are produced. Errors of the request are raised here, not at the first delta."""
        with self._alone():
            request_id = self._add(prompt, params, trace)
            return Stream(self, request_id, self._inbox[request_id])

    def load_head(self, path: str | PathLike[str] | None, method: str | None = None) -> list[HeadInfo]:
        """Put the draft head at `path` (directory, hub id or shipped name) in place of the one of its kind; None: go without, for
        `method` or at all. Returns the heads then in use.

        Requests that run go on, with the same text: the head is read and checked beside them and swapped in between two steps. The old
        head comes back by itself if the new one proves worse. Raises what `LiveHeads.load` raises, and then nothing has changed.
        """
        change = self.engine.heads.load(None if path is None else fspath(path), method)
        with self._alone():
            if self._stepping:  # an observer, or a collector that runs in the middle of a step of this very thread
                raise InvalidRequest("load_head cannot be called from inside a step; call it from another thread", param="path")
            self.engine.swap_heads(change)
            return self.engine.heads.info()

    # -- the engine, one thread at a time ---------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Own the engine; re-entrant. The thread that waits holds `_next`, so the one that leaves cannot overtake it."""
        if self._owner == threading.get_ident():
            yield
            return
        with self._next:
            self._lock.acquire()
            self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
            self._lock.release()

    def _add(self, prompt: Any, params: Any, trace: bool) -> str:
        """Queue one request and open its inbox, in one go: no step may fall between."""
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams (or one for each prompt), got {params!r:.80}", param="params")
        request_id = f"offline-{next(self._ids)}"
        self.engine.add_request(request_id, prompt, params or SamplingParams(), trace=trace)
        self._inbox[request_id] = []
        return request_id

    def _step(self, inboxes: Sequence[list[RequestOutput]]) -> None:
        """One step for all, unless another thread has filled one of these inboxes meanwhile."""
        with self._alone():
            if any(inboxes):
                return
            self._stepping = True
            try:
                self._deliver(self.engine.step())
            finally:
                self._stepping = False
                self._abandon([])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """A step moves every request: hand each output to the call that waits for it, whoever made the step."""
        for output in outputs:
            if output.request_id in self._inbox:
                self._inbox[output.request_id].append(output)

    def _abandon(self, ids: list[str]) -> None:
        """Abort requests. The collector may close a forgotten stream in the middle of a step, which then takes effect after it."""
        with self._alone():
            self._dropped += ids
            if self._stepping or not self._dropped:
                return
            while self._dropped:
                request_id = self._dropped.pop()
                self._inbox.pop(request_id, None)
                self.engine.abort(request_id)
            self._deliver(self.engine.collect())

    def _run(self, wanted: list[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        """Step until every wanted request is finished, joining deltas."""
        from tqdm import tqdm

        done: dict[str, RequestOutput] = {}
        inboxes = {request_id: self._inbox[request_id] for request_id in wanted}
        with tqdm(total=len(wanted), disable=not use_tqdm, unit="req", desc="specdec") as bar:
            while inboxes:
                self._step(list(inboxes.values()))
                for request_id, inbox in list(inboxes.items()):
                    while inbox:
                        output = inbox.pop(0)
                        done[request_id] = _join(done.get(request_id), output)
                        if output.finished:
                            del inboxes[request_id], self._inbox[request_id]
                            bar.update()
        return done


class Stream(Iterator[RequestOutput]):
    """The deltas of one request. `close` aborts it if it is not finished; so does letting go of the iterator."""

    def __init__(self, llm: LLM, request_id: str, inbox: list[RequestOutput]):
        self._llm, self._request_id, self._inbox = llm, request_id, inbox
        self._open = True

    def __next__(self) -> RequestOutput:
        if not self._open:
            raise StopIteration
        try:
            while not self._inbox:
                self._llm._step([self._inbox])
        except BaseException:
            self.close()
            raise
        output = self._inbox.pop(0)
        if output.finished:
            self._open = False
            self._llm._inbox.pop(self._request_id, None)
        return output

    def close(self) -> None:
        """Abort the request unless it is finished; harmless the second time."""
        if self._open:
            self._open = False
            self._llm._abandon([self._request_id])

    def __del__(self) -> None:
        self.close()


def _as_list(prompts: Any) -> list[Any]:
    """Normalise str | token ids | list of either. The engine judges the prompts themselves."""
    if isinstance(prompts, str):
        return [prompts]
    if getattr(prompts, "ndim", 0) in (1, 2):  # arrays and tensors: one prompt, or one a row
        prompts = prompts.tolist()
    if not isinstance(prompts, (list, tuple, range)) or not prompts:
        raise InvalidRequest("prompts must be text, token ids, or a non-empty list of them", param="prompts")
    many: list[Any] = [p.tolist() if hasattr(p, "tolist") else p for p in prompts]
    return [many] if _is_integer(many[0]) else many


def _is_integer(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return True


def _plain(messages: Any) -> list[dict[str, Any]]:
    """Messages with text parts joined to one text, which is what templates expect. InvalidRequest names the bad field."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest(f"a conversation must be a non-empty list of messages, got {messages!r:.80}", param="messages")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"message {i} must be a dict whose role is a string, got {message!r:.80}", param=f"messages[{i}].role")
        content: Any = message.get("content")
        parts: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
        ok = isinstance(parts, (list, tuple)) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in parts)
        if not ok or not all(isinstance(p.get("text"), str) for p in parts):
            why = "must be text or a list of {'type': 'text', 'text': ...} parts"
            raise InvalidRequest(f"the content of message {i} {why}, got {parts!r:.80}", param=f"messages[{i}].content")
        plain.append({**message, "content": "".join(p["text"] for p in parts)})
    return plain


def _join(whole: RequestOutput | None, delta: RequestOutput) -> RequestOutput:
    """Append a delta to what is there; choices keep their index order."""
    if whole is None:
        whole = RequestOutput(delta.request_id, delta.prompt, delta.prompt_token_ids, [], False, delta.metrics)
    choices = {c.index: c for c in whole.outputs}
    for new in delta.outputs:
        old = choices.setdefault(new.index, CompletionOutput(new.index, logprobs=None if new.logprobs is None else []))
        old.text += new.text
        old.token_ids += new.token_ids
        if old.logprobs is not None and new.logprobs is not None:
            old.logprobs += new.logprobs
        old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
    whole.outputs = [choices[i] for i in sorted(choices)]
    whole.finished, whole.metrics = delta.finished, delta.metrics
    whole.prompt_logprobs, whole.trace = delta.prompt_logprobs, delta.trace
    return whole

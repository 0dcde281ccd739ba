"""`LLM`: the offline API. Names follow vLLM's where the meaning is the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specdec.boot import build_engine
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.errors import InvalidRequest
from specdec.types import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from specdec.engine import Engine

Prompt = str | list[int]
Messages = list[dict[str, Any]]


class LLM:
    """A model ready to generate. `model`: a known name, a directory, a `.gguf` file or a hub id.

    Keyword arguments are the fields of `EngineConfig`; `speculation` is a method name or a `SpecConfig`.
    """

    def __init__(
        self, model: str = "smollm2-135m-instruct", *, speculation: str | dict[str, Any] | SpecConfig | None = "auto", **options: Any
    ):
        config = EngineConfig(model=model, speculation=SpecConfig.of(speculation), **options)
        self.engine: Engine = build_engine(config)
        self._ids = (f"offline-{i}" for i in itertools.count())
        self._inbox: dict[str, list[RequestOutput]] = {}  # of open calls: outputs that their own next look will find

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many (str, token ids, or lists of them). Outputs come in the order of the prompts."""
        many = _as_list(prompts)
        each = params if isinstance(params, list) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise InvalidRequest(f"{len(many)} prompts but {len(each)} sampling parameters; give one each, or one for all", param="params")
        ids = [next(self._ids) for _ in many]
        queued: list[str] = []
        try:
            for request_id, prompt, one in zip(ids, many, each, strict=True):
                self.engine.add_request(request_id, prompt, one, trace=trace)
                queued.append(request_id)
            done = self._run(ids, use_tqdm)
        except BaseException:
            self._abandon(queued)
            raise
        return [done[request_id] for request_id in ids]

    def chat(self, messages: Messages | list[Messages], params: SamplingParams | None = None, **options: Any) -> list[RequestOutput]:
        """Complete one conversation or many through the model's chat template."""
        many = [messages] if messages and isinstance(messages[0], dict) else messages
        return self.generate([self.tokenizer.apply_chat_template(m, add_generation_prompt=True) for m in many], params, **options)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, trace: bool = False) -> Iterator[RequestOutput]:
        """Deltas of one prompt as they are produced. Closing the iterator early aborts the request."""
        request_id = next(self._ids)
        self.engine.add_request(request_id, prompt, params or SamplingParams(), trace=trace)
        inbox = self._inbox[request_id] = []
        finished = False
        try:
            while not finished:
                while not inbox:
                    self._deliver(self.engine.step())
                output = inbox.pop(0)
                finished = output.finished
                yield output
        finally:
            self._inbox.pop(request_id, None)
            if not finished:
                self._abandon([request_id])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """A step moves every request: hand each output to the call that waits for it, whoever made the step."""
        for output in outputs:
            if output.request_id in self._inbox:
                self._inbox[output.request_id].append(output)

    def _abandon(self, ids: list[str]) -> None:
        for request_id in ids:
            self._inbox.pop(request_id, None)
            self.engine.abort(request_id)
        self._deliver(self.engine.collect())

    def _run(self, wanted: list[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        """Step until every wanted request is finished, joining deltas."""
        from tqdm import tqdm

        done: dict[str, RequestOutput] = {}
        inboxes = {request_id: self._inbox.setdefault(request_id, []) for request_id in wanted}
        with tqdm(total=len(wanted), disable=not use_tqdm, unit="req", desc="specdec") as bar:
            while inboxes:
                self._deliver(self.engine.step())
                for request_id, inbox in list(inboxes.items()):
                    while inbox:
                        output = inbox.pop(0)
                        done[request_id] = _join(done.get(request_id), output)
                        if output.finished:
                            del inboxes[request_id], self._inbox[request_id]
                            bar.update()
        return done


def _as_list(prompts: Any) -> list[Prompt]:
    """Normalise str | token ids | list of either."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise InvalidRequest("prompts must be text, token ids, or a non-empty list of them", param="prompts")
    return [list(prompts)] if isinstance(prompts[0], int) else list(prompts)


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

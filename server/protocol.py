"""Request bodies of the HTTP interface, as pydantic models, and the policy for every field that is not in them.

Explicit `null` means absent. A known sampling or feature field that is not supported is refused by name; any other unknown
field is ignored and named in the `X-Specdec-Ignored` header, or refused in strict mode.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from specdec.errors import InvalidRequest


def _valid_unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the text holds lone surrogates; send valid Unicode") from None
    return text


REFUSED = "refused"  # type of a finding that says all there is to say about its field
STRUCTURED = "structured output is not supported yet"


def _only_text(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError(REFUSED, "this model takes text only; parts of type {kind} are not supported", {"kind": repr(kind[:40])})
    return kind


def _unstructured(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "text":
        text = "{why} (type {kind}); leave response_format out, or ask for the text form in the prompt"
        raise PydanticCustomError(REFUSED, text, {"why": STRUCTURED, "kind": repr(kind[:40])})
    return kind


Text = Annotated[str, AfterValidator(_valid_unicode)]
Word = Annotated[Text, Field(min_length=1)]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
PromptIds = list[int]  # judged against the vocabulary, by the engine

# Sampling methods of other servers.
_SAMPLERS = (
    *("tfs_z", "tfs", "top_a", "top_n_sigma", "eta_cutoff", "epsilon_cutoff", "penalty_alpha", "adaptive_target", "adaptive_decay"),
    *("mirostat", "mirostat_mode", "mirostat_tau", "mirostat_eta", "xtc_probability", "xtc_threshold"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_range", "dry_sequence_breakers"),
    *("dynatemp_range", "dynatemp_exponent", "dynamic_temperature", "dynatemp_low", "dynatemp_high"),
    *("smoothing_factor", "smoothing_curve", "skew"),
)
# Fields of other servers that change which tokens come out, with what to use instead. Refused, never ignored.
UNSUPPORTED: dict[str, str] = {
    "tools": "tool calling is not supported",
    "tool_choice": "tool calling is not supported",
    "functions": "function calling is not supported",
    "function_call": "function calling is not supported",
    "audio": "only text can be produced",
    "web_search_options": "web search is not supported",
    "suffix": "filling in the middle is not supported",
    "use_beam_search": "beam search is not supported",
    "length_penalty": "beam search is not supported",
    "early_stopping": "beam search is not supported",
    "guided_json": STRUCTURED,
    "guided_regex": STRUCTURED,
    "guided_choice": STRUCTURED,
    "guided_grammar": STRUCTURED,
    "structured_outputs": STRUCTURED,
    "json_schema": STRUCTURED,
    "grammar": STRUCTURED,
    "regex": STRUCTURED,
    "ebnf": STRUCTURED,
    "logits_processors": "custom logits processors are not supported",
    "custom_logit_processor": "custom logits processors are not supported",
    "repeat_penalty": "use repetition_penalty",
    "repeat_last_n": "use repetition_penalty",
    "num_predict": "use max_tokens",
    "n_predict": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "stop_sequences": "use stop",
    "typical": "use typical_p",
    "stop_regex": "only literal stop strings are supported",
    "no_stop_trim": "use include_stop_str_in_output",
    "spaces_between_special_tokens": "not supported",
    "truncate_prompt_tokens": "prompts are never shortened; send a shorter one",
    "chat_template": "the model's own chat template is used",
    "chat_template_kwargs": "the model's own chat template is used as it is",
    "continue_final_message": "use /v1/completions to continue a text",
    "documents": "put documents into the messages",
    "thinking_token_budget": "not supported",
    "lora_request": "adapters are not supported",
    "do_sample": "use temperature (0 = greedy)",
    "num_beams": "beam search is not supported",
    "num_beam_groups": "beam search is not supported",
    "diversity_penalty": "beam search is not supported",
    "typical_threshold": "use typical_p",
    "top_n_tokens": "use top_logprobs (chat) or logprobs (completions)",
    "n_probs": "use top_logprobs (chat) or logprobs (completions)",
    "temperature_last": "the order of samplers is fixed",
    "sampler_priority": "the order of samplers is fixed",
    "sampler_order": "the order of samplers is fixed",
    "samplers": "the order of samplers is fixed",
    "negative_prompt": "guidance is not supported",
    "guidance_scale": "guidance is not supported",
    "cfg_scale": "guidance is not supported",
    "no_repeat_ngram_size": "use repetition_penalty, frequency_penalty or presence_penalty",
    "encoder_repetition_penalty": "use repetition_penalty",
    "repetition_penalty_range": "penalties look at the whole text",
    "repetition_detection": "not supported",
    "penalize_nl": "use logit_bias",
    "begin_suppress_tokens": "use logit_bias",
    "suppress_tokens": "use logit_bias",
    "ban_eos_token": "use ignore_eos",
    "random_seed": "use seed",
    "return_tokens_as_token_ids": "use return_token_ids",
    "watermark": "watermarks are not supported",
    "safe_prompt": "no prompt is added",
} | dict.fromkeys(_SAMPLERS, "not a supported sampling method")
UNSUPPORTED_IN_MESSAGE = ("tool_calls", "tool_call_id", "function_call", "audio")
# Of these, a value that looks empty asks for something too.
ALWAYS_ASK = frozenset(
    ("do_sample", "samplers", "spaces_between_special_tokens", "penalize_nl", "max_new_tokens", "num_predict", "n_predict", "random_seed")
)
# 0 switches these off.
OFF_AT_ZERO = frozenset(
    (
        *("mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability", "dynatemp_range", "smoothing_factor", "top_a", "penalty_alpha"),
        *("eta_cutoff", "epsilon_cutoff", "top_n_tokens", "n_probs", "repeat_last_n", "no_repeat_ngram_size", "min_new_tokens"),
    )
)
# OpenAI fields that carry no request for behaviour of this server; accepted without a word.
HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls")
)


class Body(BaseModel):
    """Base of all bodies and their parts: strict types, extras kept for `check_extras`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(Body):
    type: Annotated[Literal["text"], BeforeValidator(_only_text)]
    text: Text


Content = Text | list[TextPart]


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = None
    name: Text | None = None


class Prediction(Body):
    """OpenAI predicted outputs: text the answer is expected to resemble; feeds the n-gram drafters."""

    type: Literal["content"] = "content"
    content: Content


class ResponseFormat(Body):
    type: Annotated[Literal["text"], BeforeValidator(_unstructured)]


class Generation(Body):
    """Fields shared by chat and text completions. Ranges are checked by `SamplingParams`."""

    extras_without_effect: ClassVar[frozenset[str]] = HARMLESS

    model: Text | None = Field(None, description="A served model; absent = the default one")
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, float] | None = Field(None, description="Token id (as a string) to bias in [-100, 100]")
    bad_words: list[Word] | None = None
    allowed_token_ids: TokenIds | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop: Word | list[Word] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    prompt_logprobs: int | None = Field(None, ge=0, le=100)
    logprobs_mode: Literal["raw", "processed"] | None = Field(None, description="Before or after temperature, penalties and truncation")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    speculation: dict[str, Any] | Text | None = Field(
        None, description='Override of the server\'s speculation: {"method", "nodes", "depth", "width"}; {"method": "off"} switches it off'
    )
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = Field(None, description="Add the token ids of prompt and choices to the response")


class ChatRequest(Generation):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(Generation):
    prompt: Text | list[Text] | PromptIds | list[PromptIds]
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=128)


def check_extras(body: Generation, *, strict: bool) -> list[str]:
    """Names of ignored unknown fields, nested ones as paths. Refuses unsupported fields, and every unknown one if `strict`."""
    ignored = []
    for name, value in (body.model_extra or {}).items():
        if name in UNSUPPORTED and _asks(name, value):
            raise InvalidRequest(f"{name}: {UNSUPPORTED[name]}; leave the field out", param=name)
        if name not in UNSUPPORTED and name not in body.extras_without_effect and value is not None:
            ignored.append(name)
    for path, part in _parts(body):
        for name, value in (part.model_extra or {}).items():
            if name in UNSUPPORTED_IN_MESSAGE and isinstance(part, Message) and _asks(name, value):
                raise InvalidRequest(f"{path}.{name}: tool calls and audio are not supported; leave the field out", param=f"{path}.{name}")
            if value is not None:
                ignored.append(f"{path}.{name}")
    if strict and ignored:
        raise InvalidRequest(f"unknown field {ignored[0]!r}; remove it, or start the server without --strict", param=ignored[0])
    return ignored


def _asks(name: str, value: Any) -> bool:
    """Whether this value of an unsupported field asks for anything."""
    if value is None or (name == "tool_choice" and value in ("none", "auto")):
        return False
    if name in ALWAYS_ASK:
        return True
    return not (value is False or value in ([], {}) or (value == 0 and name in OFF_AT_ZERO))


def _parts(body: Generation) -> list[tuple[str, Body]]:
    """Nested objects of the body with their paths."""
    parts: list[tuple[str, Body | None]] = [(name, getattr(body, name)) for name in ("stream_options", "prediction", "response_format")]
    for i, message in enumerate(body.messages if isinstance(body, ChatRequest) else ()):
        parts.append((f"messages[{i}]", message))
    return [(path, part) for path, part in parts if part is not None]

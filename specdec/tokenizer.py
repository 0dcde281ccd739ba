"""`Tokenizer`: text to ids and back, chat templates, and text that grows token by token.

It runs on the `tokenizers` library alone; transformers, whose import costs seconds, is asked only for a directory that
has no tokenizer.json.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import InvalidRequest, UnsupportedCheckpoint
from specdec.models.chat_template import ChatTemplate
from specdec.models.jsonfile import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"


def _byte_values() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """vocab_size: ids the model can produce (its logits), at least the tokenizer's own. eos_ids: the model's end tokens."""

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int | None = None,
        eos_ids: Iterable[int] = (),
        template: ChatTemplate | None = None,
    ):
        from tokenizers import decoders

        own = backend.get_vocab_size(with_added_tokens=True)
        self.backend = backend
        self.vocab_size = own if vocab_size is None else vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.template = template
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}
        self._byte_values = _byte_values()
        if own > self.vocab_size:
            raise UnsupportedCheckpoint(
                f"the tokenizer has {own} tokens but the model's vocab_size is {self.vocab_size}: it belongs to another model"
            )

    @classmethod
    def from_directory(cls, directory: Path, *, vocab_size: int | None = None, eos_ids: Iterable[int] = ()) -> Tokenizer:
        """Read tokenizer.json, and the chat template where there is one. Raises UnsupportedCheckpoint naming the file."""
        file = directory / "tokenizer.json"
        backend = _read_backend(file) if file.is_file() else _convert_backend(directory)
        settings = directory / "tokenizer_config.json"
        config = read_json(settings) if settings.is_file() else {}
        try:
            return cls(backend, vocab_size=vocab_size, eos_ids=eos_ids, template=ChatTemplate.from_directory(directory, config))
        except UnsupportedCheckpoint as err:
            raise UnsupportedCheckpoint(f"{directory}: {err.message}") from err

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids. `add_special` adds what the tokenizer itself prepends or appends to a prompt (a BOS token, if any)."""
        if not isinstance(text, str):
            raise InvalidRequest(f"text to tokenise must be a string, got {type(text).__name__}", param="prompt")
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special).ids
        except (UnicodeEncodeError, TypeError):  # lone surrogates cannot be encoded as UTF-8
            raise InvalidRequest("the text is not valid Unicode (it contains lone surrogates)", param="prompt") from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; incomplete UTF-8 becomes U+FFFD. InvalidRequest for ids outside the vocabulary."""
        checked = [self._check(i) for i in ids]
        text: str = self.backend.decode(checked, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token: int) -> str:
        """One token as text, special ones included; bytes that are not UTF-8 by themselves become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; empty for ids the tokenizer does not name (padding of the embedding)."""
        known = self._bytes_of.get(token)
        if known is None:
            known = self._bytes_of[token] = self._find_bytes(self._check(token))
        return known

    def _find_bytes(self, token: int) -> bytes:
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if not self.byte_level:
            return str(self.backend.decode([token], skip_special_tokens=False)).encode()
        values = [self._byte_values.get(c) for c in piece]
        return piece.encode() if None in values else bytes(v for v in values if v is not None)

    def _check(self, token: int) -> int:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
            raise InvalidRequest(f"token id {token!r} is outside the vocabulary [0, {self.vocab_size})", param="prompt")
        return token

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any) -> list[int]:
        """Ids of a conversation. The template writes every special token itself, so none is added here (no second BOS).

        Raises InvalidRequest when the model has no template or the template refuses the messages.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, **options), add_special=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any) -> str:
        """The conversation as the template writes it. `options` become template variables (tools, enable_thinking, …)."""
        if self.template is None:
            raise InvalidRequest("this model has no chat template; use plain completions", param="messages")
        return self.template.render(messages, add_generation_prompt=add_generation_prompt, **options)

    def detokenizer(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh incremental detokenizer for text that follows `prompt`."""
        if self.byte_level:
            return IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return WindowDetokenizer(self, prompt, skip_special_tokens=skip_special_tokens)


class IncrementalDetokenizer:
    """Text of a growing byte-level sequence, O(1) per token; the pieces join to `decode` of all tokens.

    A character whose UTF-8 bytes are spread over tokens is held back until its last byte arrives.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters this token completes, perhaps none."""
        return "" if token in self._skipped else self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """No more tokens: U+FFFD for bytes that never became a character."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer(IncrementalDetokenizer):
    """For tokenizers whose decoder looks at neighbouring tokens (SentencePiece style): decodes a short sliding window.

    Text ending in U+FFFD may be an unfinished character and is held back, at most for `PATIENCE` tokens.
    """

    CONTEXT, PATIENCE = 6, 8

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True):
        super().__init__(tokenizer, skip_special_tokens=skip_special_tokens)
        self._skip = skip_special_tokens
        self._before = list(prompt)[-self.CONTEXT :]
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        self._pending.append(token)
        piece = self._piece()
        if piece.endswith(REPLACEMENT) and len(self._pending) < self.PATIENCE:
            return ""
        return self._take(piece)

    def flush(self) -> str:
        return self._take(self._piece()) if self._pending else ""

    def _piece(self) -> str:
        before = self._tokenizer.decode(self._before, skip_special_tokens=self._skip)
        return self._tokenizer.decode(self._before + self._pending, skip_special_tokens=self._skip)[len(before) :]

    def _take(self, piece: str) -> str:
        self._before = (self._before + self._pending)[-self.CONTEXT :]
        self._pending = []
        return piece


def _read_backend(file: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(file))
    except Exception as err:  # the Rust side raises bare Exception
        raise UnsupportedCheckpoint(f"{file}: not a readable tokenizer.json: {err}") from err


def _convert_backend(directory: Path) -> Backend:
    """Slow path for directories with only tokenizer.model, or vocab and merges: let transformers convert them."""
    try:
        from transformers import AutoTokenizer

        backend: Backend = AutoTokenizer.from_pretrained(directory, use_fast=True).backend_tokenizer
    except Exception as err:
        raise UnsupportedCheckpoint(f"{directory}: no tokenizer.json, and transformers cannot make one: {err}") from err
    return backend

"""Text of one choice, token by token: incremental detokenisation, stop strings, and what is safe to stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.config import SamplingParams
    from specdec.tokenizer import Tokenizer


class OutputText:
    """Accumulates the text of a choice and ends it at the earliest stop string.

    No character of a stop string is ever handed out: the tail that could still grow into one is held back. Stop strings
    are looked for only in text produced after `min_tokens` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams):
        self.text = ""
        self.stop_string: str | None = None
        self._stops = params.stop_strings
        self._longest = max((len(s) for s in self._stops), default=0)
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._skip_special = params.skip_special_tokens
        self._detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=params.skip_special_tokens)
        self._num_tokens = 0
        self._search_from = 0
        self._handed_out = 0
        self._closed = False

    def push(self, token: int, *, ends: bool = False) -> bool:
        """Add one token; True when it completes a stop string. `ends`: an end token, shown only if stops are included."""
        self._num_tokens += 1
        piece = "" if ends and not self._include else self._detokenizer.push(token)
        return self._add(piece)

    def close(self) -> bool:
        """No more tokens: flush incomplete bytes (as U+FFFD) and release what was held back. True on a late stop match."""
        matched = self.stop_string is None and self._add(self._detokenizer.flush())
        self._closed = True
        return matched

    def take(self) -> str:
        """Text that is new since the last call and can no longer be part of a stop string."""
        end = len(self.text) if self._closed or self.stop_string is not None else self._safe_end()
        piece = self.text[self._handed_out : end]
        self._handed_out = max(end, self._handed_out)
        return piece

    def _add(self, piece: str) -> bool:
        before = len(self.text)
        self.text += piece
        if self._num_tokens < self._min_tokens:
            self._search_from = len(self.text)
            return False
        start = max(self._search_from, before - self._longest + 1, 0)
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if not found:
            return False
        at, self.stop_string = min(found, key=lambda match: match[0])
        self.text = self.text[: at + len(self.stop_string) if self._include else at]
        return True

    def _safe_end(self) -> int:
        """Everything but the longest tail that is a proper prefix of some stop string."""
        for size in range(min(self._longest - 1, len(self.text) - self._handed_out), 0, -1):
            tail = self.text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return len(self.text) - size
        return len(self.text)

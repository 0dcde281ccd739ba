"""Chat templates: Jinja in a sandbox, with the helpers Hugging Face templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import InvalidRequest, UnsupportedCheckpoint

if TYPE_CHECKING:
    import jinja2

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """Template source and the special tokens it may name. Compiled on first use; `now` is the clock of `strftime_now`."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, *, now: Callable[[], datetime] = datetime.now):
        self.source = source
        self.tokens = dict(tokens or {})
        self._now = now

    @classmethod
    def from_directory(cls, directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """From chat_template.jinja, else `chat_template` of tokenizer_config.json (its "default" if named ones are listed)."""
        file = directory / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):
            named = {t["name"]: t["template"] for t in source if isinstance(t, Mapping) and "name" in t and "template" in t}
            source = named.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise UnsupportedCheckpoint("tokenizer_config.json: chat_template must be a string or a list of named templates")
        return cls(source, {name: text for name in _TOKENS if (text := _content(config.get(name))) is not None})

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text. InvalidRequest when the template is broken or refuses these messages."""
        import jinja2

        try:
            return self._compiled.render(messages=messages, **{**self.tokens, **variables})
        except jinja2.TemplateError as err:
            raise InvalidRequest(f"the chat template refuses these messages: {err}", param="messages") from err
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as err:
            raise InvalidRequest(f"the chat template fails on these messages: {err}", param="messages") from err

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(jinja2.ext.Extension):
            """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is only its body."""

            tags = {"generation"}  # noqa: RUF012 - jinja's own protocol

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda pattern: self._now().strftime(pattern)
        return environment.from_string(self.source)


def _content(token: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with `content`."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own `tojson` escapes HTML, which prompts do not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

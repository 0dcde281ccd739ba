"""Tokenizer: encoding, chat templates, and text that grows token by token."""

from __future__ import annotations

import json
import random
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from specdec.errors import InvalidRequest, UnsupportedCheckpoint
from specdec.models.chat_template import ChatTemplate
from specdec.models.hub import DEFAULT_MODEL
from specdec.models.load import find_checkpoint
from specdec.tokenizer import Tokenizer, WindowDetokenizer
from tests.oracle import prompts
from tests.tiny import tiny_tokenizer, write_tiny


@cache
def tiny() -> Tokenizer:
    return Tokenizer(Backend.from_str(json.dumps(tiny_tokenizer())), vocab_size=520, eos_ids=[2])


@cache
def default() -> Tokenizer:
    return find_checkpoint(DEFAULT_MODEL, progress=False).tokenizer()


def grown(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> str:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 519), max_size=40), st.booleans())
def test_pieces_join_to_the_whole(ids: list[int], skip: bool) -> None:
    """For any ids, invalid UTF-8 included."""
    assert grown(tiny(), ids, skip=skip) == tiny().decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_text_round_trips(text: str) -> None:
    ids = tiny().encode(text)
    assert tiny().decode(ids, skip_special_tokens=False) == text
    assert grown(tiny(), ids, skip=False) == text


def test_a_character_appears_with_its_last_byte() -> None:
    ids = tiny().encode("€")
    assert len(ids) == 3, "one token a byte"
    detokenizer = tiny().detokenizer()
    assert [detokenizer.push(i) for i in ids] == ["", "", "€"] and detokenizer.flush() == ""
    detokenizer = tiny().detokenizer()
    assert [detokenizer.push(i) for i in ids[:2]] == ["", ""] and detokenizer.flush() == "\ufffd"


def test_pieces_are_final_and_never_held_longer_than_a_character() -> None:
    """Bytes that can no longer become a character are given out at once, so nothing accumulates."""
    detokenizer = tiny().detokenizer()
    start = tiny().encode("€")[0]
    assert [detokenizer.push(start) for _ in range(4)] == ["", "\ufffd", "\ufffd", "\ufffd"]


def test_special_tokens_and_padding_ids() -> None:
    assert tiny().special_ids == {0, 1, 2} and tiny().eos_ids == {2}
    assert tiny().encode("<|im_end|>") == [2]
    assert tiny().decode([2]) == "" and tiny().decode([2], skip_special_tokens=False) == "<|im_end|>"
    assert tiny().token_bytes(2) == b"<|im_end|>"
    assert tiny().token_bytes(515) == b"", "an id of the padded embedding without a token"
    assert tiny().token_text(tiny().encode("€")[0]) == "\ufffd"


@pytest.mark.parametrize("token", [-1, 520, 10**9, True, "5", 1.0, None])
def test_ids_outside_the_vocabulary_are_refused(token: object) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        tiny().decode([5, token])  # type: ignore[list-item]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", b"bytes", None, 3])
def test_what_is_not_text_is_refused(text: object) -> None:
    with pytest.raises(InvalidRequest):
        tiny().encode(text)  # type: ignore[arg-type]


def test_sentencepiece_style_decoders_use_a_window() -> None:
    vocab = {"▁a": 0, "b": 1, "▁c": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "▁": 6}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = Tokenizer(backend)
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    rng = random.Random(0)
    for _ in range(50):
        ids = [0] + [token for _ in range(12) for token in rng.choice([[0], [1], [2], [3, 4, 5]])]
        assert grown(tokenizer, ids) == tokenizer.decode(ids)
    follow = tokenizer.detokenizer([0, 1])
    assert follow.push(2) == " c", "text after a prompt keeps its leading space"
    assert grown(tokenizer, [0, 3, 4]).startswith("a\ufffd")


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}{{ bos_token }}", "hi<s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ '<é>' | tojson }}", '"<é>"'),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2030"),
        ("{% for m in messages %}\n  {% if loop.first %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ 1 }}{% endgeneration %}", "1"),
        ("{{ 'on' if enable_thinking is defined and enable_thinking else 'off' }}{{ 'G' if add_generation_prompt }}", "onG"),
    ],
)
def test_templates_have_what_they_expect(source: str, expected: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2030, 1, 2))
    assert template.render(MESSAGES, add_generation_prompt=True, enable_thinking=True) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% if %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_failing_templates_are_the_requests_fault(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        ChatTemplate(source).render(MESSAGES)
    assert caught.value.param == "messages"


def test_template_files(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    settings_file = directory / "tokenizer_config.json"
    loaded = Tokenizer.from_directory(directory)
    assert loaded.decode(loaded.apply_chat_template(MESSAGES), skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert not loaded.render_chat(MESSAGES, add_generation_prompt=False).endswith("assistant\n")
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ eos_token }}"}]
    settings_file.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "<e>"}}))
    assert Tokenizer.from_directory(directory).render_chat(MESSAGES) == "D<e>"
    (directory / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_directory(directory).render_chat(MESSAGES) == "J"
    (directory / "chat_template.jinja").unlink()
    settings_file.unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer.from_directory(directory).apply_chat_template(MESSAGES)
    settings_file.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(UnsupportedCheckpoint, match="chat_template"):
        Tokenizer.from_directory(directory)


def test_no_second_bos(tmp_path: Path) -> None:
    """A tokenizer that prepends BOS by itself, and a template that writes it: one BOS in a chat, one in a prompt."""
    directory = write_tiny(tmp_path)
    spec = tiny_tokenizer()
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("hi")[0] == 1 and 1 not in tokenizer.encode("hi", add_special=False)
    assert tokenizer.apply_chat_template(MESSAGES)[:2] != [1, 1] and tokenizer.apply_chat_template(MESSAGES)[0] == 1


def test_broken_tokenizer_files(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    (directory / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UnsupportedCheckpoint, match=r"tokenizer\.json"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(directory)


def test_vocab_and_merges_alone_are_converted(tmp_path: Path) -> None:
    """A directory in the old GPT-2 layout has no tokenizer.json; transformers converts it."""
    spec = tiny_tokenizer()["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(spec["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in spec["merges"]) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>"}))
    text = "the thing and 10 more"
    assert Tokenizer.from_directory(tmp_path).encode(text) == tiny().encode(text)


# Digits are split off one by one before the byte-level words are cut: white space in front of one stays by itself,
# whereas without that step a space joins the digit ("Ġ1").
SPLITS = {
    "1984": ["1", "9", "8", "4"],
    "year 1984": ["year", "Ġ", "1", "9", "8", "4"],
    "a  12": ["a", "ĠĠ", "1", "2"],
    "in 3 days": ["in", "Ġ", "3", "Ġdays"],
    "x\n7": ["x", "Ċ", "7"],
}


@pytest.mark.model
@pytest.mark.parametrize("text", SPLITS)
def test_default_model_splits_digits(text: str) -> None:
    assert [default().backend.id_to_token(i) for i in default().encode(text)] == SPLITS[text]


@pytest.mark.model
def test_default_model_round_trips_and_streams() -> None:
    extra = ["naïve café 🦜🧪", "tabs\t\tand\r\nlines", "数字 123 と", "<|im_start|>x<|im_end|>", "١٢٣"]
    for text in [*prompts(), *extra]:
        ids = default().encode(text)
        assert default().decode(ids, skip_special_tokens=False) == text
        assert grown(default(), ids, skip=False) == text


@pytest.mark.model
def test_default_model_template() -> None:
    ids = default().apply_chat_template(MESSAGES)
    text = default().decode(ids, skip_special_tokens=False)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert text == system + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1 and default().eos_ids == {2} and default().encode("hi")[0] != 1

"""Chat templates are found under their names in all places where checkpoints have them."""

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import ConfigError
from inflight.text.chat_format.named_templates import MAX_FILE_BYTES as LIMIT
from inflight.text.chat_format.named_templates import in_config, of_chats, of_folder, of_gguf

LISTED = [
    {"name": "default", "template": "d"},
    {"name": "tool_use", "template": "t"},
    {"name": "rag", "template": "r"},
]
NAMED = {"default": "d", "tool_use": "t", "rag": "r"}


@pytest.mark.parametrize(
    ("value", "templates"),
    [
        ("d", {"default": "d"}),
        (LISTED, NAMED),
        (None, {}),
        ([], {}),
        ([{"name": "rag"}, "x", {"name": 1, "template": "x"}, LISTED[2]], {"rag": "r"}),
        ({"default": "d"}, {}),
    ],
)
def test_tokenizer_config_has_one_or_a_list(
    tmp_path: Path, value: Any, templates: dict[str, str]
) -> None:
    assert of_folder(tmp_path, {"chat_template": value}) == templates


def test_files_take_the_place_of_the_config(tmp_path: Path) -> None:
    config = {"chat_template": LISTED}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor's"}))
    assert of_folder(tmp_path, config) == NAMED
    assert of_folder(tmp_path, {}) == {"default": "processor's"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    assert of_folder(tmp_path, config) == {"tool_use": "T"}
    (tmp_path / "chat_template.jinja").write_text("Dé", "utf-8")
    assert of_folder(tmp_path, config) == {"default": "Dé", "tool_use": "T"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja cannot be read"),
        ("chat_template.jinja", b"x" * (LIMIT + 1), rf"{LIMIT + 1} bytes, .* allowed: {LIMIT}"),
        ("chat_template.json", b"{", r"chat_template\.json cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        of_folder(tmp_path, {})


def test_gguf_has_one_key_for_each(tmp_path: Path) -> None:
    key = "tokenizer.chat_template"
    metadata = {
        key: "d",
        f"{key}.tool_use": "t",
        f"{key}.rag": "r",
        "tokenizer.chat_templates": ["rag", "tool_use"],
    }
    assert of_gguf(metadata) == NAMED
    assert of_gguf({f"{key}.rag": "r"}) == {"rag": "r"}
    assert of_gguf({}) == {}


def test_a_config_is_read_as_it_is_written(tmp_path: Path) -> None:
    for templates in ({}, {"default": "d"}, {"rag": "r"}, NAMED):
        assert of_folder(tmp_path, {"chat_template": in_config(templates)}) == templates


def test_without_a_default_chats_have_the_first_one() -> None:
    assert of_chats(NAMED) == "d"
    assert of_chats({"tool_use": "t", "rag": "r", "other": "o"}) == "r"
    assert of_chats({"tool_use": "t"}) == "t"
    assert of_chats({}) is None

"""Texts are encoded to the ids of the model's training, whatever the tokenizer's file format."""

import itertools
import json
import multiprocessing
import os
import shutil
import threading
from pathlib import Path

import gguf
import pytest
import tokenizers
import transformers
from tokenizers import decoders as library_decoders
from tokenizers import models, pre_tokenizers

from gguf_transformers import quick_reader
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.errors import ConfigError, RequestError
from inflight.text.gguf_tokenizer import build, read, write_folder
from inflight.text.linear_pipeline import is_linear
from inflight.text.tokenizer import Tokenizer, export
from texts import TEXTS
from vocabularies import (
    LLAMA3_TEMPLATE,
    byte_level,
    byte_level_folder,
    sentencepiece_gguf,
    sentencepiece_pieces,
    write_gguf,
)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_smollm_s_ids_are_those_of_transformers(
    smollm: Tokenizer, smollm_checkpoint: Checkpoint
) -> None:
    path = smollm_checkpoint.path
    with quick_reader():
        right = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # It forgets that SmolLM2 takes digits one by one; its published tokenizer.json does not.
    right.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    assert [smollm.encode(text) for text in TEXTS] == right(TEXTS)["input_ids"]


def test_smollm_takes_digits_one_by_one(smollm: Tokenizer) -> None:
    assert len(plain(smollm, "12345")) == 5
    assert plain(smollm, "x 42") == [*plain(smollm, "x "), *plain(smollm, "4"), *plain(smollm, "2")]


def test_smollm_s_settings_are_read(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert (smollm.bos_token, smollm.bos_id) == ("<|im_start|>", 1)
    assert (smollm.eos_token, smollm.eos_ids) == ("<|im_end|>", (2,))
    assert len(smollm.special_ids) == 17
    assert smollm.special_ids[0] == "<|endoftext|>"
    assert smollm.chat_template is not None and "<|im_start|>" in smollm.chat_template
    assert smollm.encode("Hello") == plain(smollm, "Hello")  # add_bos_token is false


def test_special_tokens_in_a_prompt_are_special(smollm: Tokenizer) -> None:
    assert smollm.encode("<|im_start|>user")[0] == 1


def test_a_batch_is_its_texts_one_by_one(tokenizer: Tokenizer) -> None:
    texts = TEXTS[:50]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "😀"[0] + "\udc80"])
def test_a_lone_surrogate_is_refused(smollm: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match=r"text_input: .*lone surrogate at character"):
        smollm.encode(text)
    with pytest.raises(RequestError, match=r"prompt: .*lone surrogate"):
        smollm.encode_batch(["fine", text], param="prompt")
    with pytest.raises(RequestError, match=r"messages: .*lone surrogate"):
        smollm.encode_pieces([1, text])


def test_pieces_are_one_text_whose_strings_never_make_markers(tokenizer: Tokenizer) -> None:
    marker, id_ = next((text, id_) for text, id_ in tokenizer.markers.items() if len(text) > 3)
    for text in TEXTS[:60]:
        whole = f"{marker}{text}{marker}{marker}\n{text}"
        pieces = [id_, text, id_, id_, "\n" + text[:3], text[3:]]
        assert tokenizer.encode_pieces(pieces) == plain(tokenizer, whole)
    ids = tokenizer.encode_pieces([id_, f"a {marker}{marker} b", id_])
    assert [i for i, found in enumerate(ids) if found == id_] == [0, len(ids) - 1]
    assert tokenizer.encode_pieces([]) == []


def test_pieces_keep_added_tokens_that_are_no_markers(llama3: Tokenizer) -> None:
    assert "<tool>" not in llama3.markers
    tool = byte_level().token_to_id("<tool>")
    (eot,) = llama3.eos_ids
    assert llama3.encode_pieces(["<tool>", eot]) == [tool, eot]


def test_a_marker_made_by_merges_is_refused(tmp_path: Path) -> None:
    """Some tokenizers spell "</s>" by merges; it must not end a turn from within a text."""
    vocabulary = {"<": 0, "e": 1, ">": 2, "<e": 3, "<e>": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("<", "e"), ("<e", ">")]))
    backend.add_special_tokens(["<e>"])
    tokenizer = Tokenizer(backend, eos_token="<e>")
    assert tokenizer.encode_pieces(["<e", 4]) == [3, 4]
    with pytest.raises(RequestError, match="special tokens"):
        tokenizer.encode_pieces(["<e>", 4])


class TestFolder:
    def test_ids_are_those_of_transformers(self, llama3: Tokenizer, llama3_folder: Path) -> None:
        right = transformers.AutoTokenizer.from_pretrained(llama3_folder)
        assert llama3.encode_batch(TEXTS) == right(TEXTS)["input_ids"]
        assert llama3.encode("")[0] == llama3.bos_id

    def test_the_template_s_three_places(self, tmp_path: Path) -> None:
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
        assert _load(byte_level_folder(tmp_path)).chat_template == LLAMA3_TEMPLATE
        assert _load(byte_level_folder(tmp_path, chat_template=named)).chat_template == "yes"
        (tmp_path / "chat_template.jinja").write_text("é", "utf-8")
        assert _load(tmp_path).chat_template == "é"
        (tmp_path / "chat_template.jinja").unlink()
        assert _load(byte_level_folder(tmp_path, chat_template=None)).chat_template is None

    def test_a_template_for_tools_has_two_places(self, tmp_path: Path) -> None:
        named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
        assert _load(byte_level_folder(tmp_path)).tool_chat_template is None
        found = _load(byte_level_folder(tmp_path, chat_template=named))
        assert (found.chat_template, found.tool_chat_template) == ("b", "a")
        # As transformers saves it.
        byte_level_folder(tmp_path)
        both = transformers.AutoTokenizer.from_pretrained(tmp_path)
        both.chat_template = {"default": "c", "tool_use": "d"}
        both.save_pretrained(tmp_path / "two")
        (tmp_path / "two" / "config.json").write_text("{}")
        export(locate(str(tmp_path / "two")), tmp_path / "three")
        for folder in ("two", "three"):
            found = _load(tmp_path / folder)
            assert (found.chat_template, found.tool_chat_template) == ("c", "d")

    def test_generation_config_names_the_ends(self, tmp_path: Path) -> None:
        byte_level_folder(tmp_path)
        eot = byte_level().token_to_id("<|eot_id|>")
        assert _load(tmp_path).eos_ids == (eot,)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
        assert _load(tmp_path).eos_ids == (7, 8, eot)
        (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [9]}}))
        assert _load(tmp_path).eos_ids == (7, 8, 9, eot)

    def test_padding_and_truncation_are_off(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
        backend.enable_truncation(3)
        backend.enable_padding(length=64)
        byte_level_folder(tmp_path)
        backend.save(str(tmp_path / "tokenizer.json"))
        assert len(_load(tmp_path).encode("one two three four five six")) not in (3, 64)

    def test_invalid_messages_are_named(self, tmp_path: Path) -> None:
        byte_level_folder(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("[")
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
            _load(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("[]")
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not a JSON object"):
            _load(tmp_path)
        (tmp_path / "tokenizer_config.json").unlink()
        assert _load(tmp_path).bos_token is None
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
            _load(tmp_path)
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
            _load(tmp_path)

    def test_a_folder_without_a_tokenizer_is_a_model_of_ids(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert Tokenizer.load_if_present(locate(str(tmp_path))) is None
        byte_level_folder(tmp_path)
        assert Tokenizer.load_if_present(locate(str(tmp_path))) is not None


class TestByteLevelGguf:
    @pytest.mark.parametrize(
        ("pre", "text", "parts"),
        [
            ("smollm", "I'm 123 ½", ["I", "'m", " ", "1", "2", "3", " ", "½"]),
            ("gpt-2", "I'M 123\n\n x", ["I", "'", "M", " 123", "\n\n", " x"]),
            ("llama-bpe", "I'M 12345\n\n x", ["I", "'M", " ", "123", "45", "\n\n", " x"]),
            ("llama-bpe", "a.b!!\n c", ["a", ".b", "!!\n", " c"]),
            ("qwen2", "I'M 123\n\n x", ["I", "'M", " ", "1", "2", "3", "\n\n", " x"]),
            ("tekken", "HTMLParser 12/\n", ["HTMLParser", " ", "1", "2", "/\n"]),
            ("tekken", "fooBar it's", ["foo", "Bar", " it", "'s"]),
            ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
            ("olmo", "I'M 123", ["I", "'", "M", " 123"]),
            ("command-r", "x 12", ["x", " ", "1", "2"]),
            ("dbrx", "I'M 12345\n\n x", ["I", "'M", " ", "123", "45", "\n\n", " x"]),
            ("glm4", "a.b!!\n 1234", ["a", ".b", "!!\n", " ", "123", "4"]),
            ("gpt-4o", "fooBar it's 1234/\n", ["foo", "Bar", " it's", " ", "123", "4", "/\n"]),
            ("gpt-4o", "HTMLParser's", ["HTMLParser's"]),
            ("seed-coder", "a 12!!\n\nb", ["a", " ", "1", "2", "!!", "\n\n", "b"]),
            ("deepseek-coder", "it's 12\n\nb", ["it", "'", "s", " ", "1", "2", "\n", "\n", "b"]),
            ("deepseek-coder", "a\u4e2d\u6587 +=", ["a", "\u4e2d\u6587", " +="]),
            ("deepseek-llm", "it's 12 +=", ["it", "'", "s", " ", "1", "2", " +="]),
            ("deepseek-llm", "Ab  cd  ", ["Ab", " ", " cd", "  "]),
            ("deepseek-llm", "a\u4e2d\u6587\u3002", ["a", "\u4e2d\u6587", "\u3002"]),
            ("deepseek-v3", "I'm 12345!!\n\n x", ["I", "'m", " ", "123", "45", "!!\n\n", " x"]),
            ("deepseek-v3", "a.b _c\u4e2d\u6587", ["a", ".b", " _", "c", "\u4e2d\u6587"]),
        ],
    )
    def test_each_pre_tokenizer_splits_as_its_model_s(
        self, pre: str, text: str, parts: list[str]
    ) -> None:
        backend = build(_byte_level_metadata(pre=pre))
        spelled = backend.pre_tokenizer.pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in spelled] == parts

    def test_only_deepseek_llm_searches_in_time_that_is_not_linear(self) -> None:
        """Spaces that do not end a text are searched for its end from each of them."""
        linear = {
            pre: is_linear(build(_byte_level_metadata(pre=pre)))
            for pre in ("deepseek-llm", "deepseek-coder", "deepseek-v3", "llama-bpe")
        }
        assert [pre for pre in linear if not linear[pre]] == ["deepseek-llm"]

    def test_llama3_s_ids_are_those_of_its_folder(self, tmp_path: Path, llama3: Tokenizer) -> None:
        metadata = _byte_level_metadata(pre="llama-bpe", bos_token_id=600, eos_token_id=603)
        path = write_gguf(tmp_path / "model.gguf", _prefixed(metadata))
        tokenizer = _load(path)
        assert tokenizer.encode_batch(TEXTS) == llama3.encode_batch(TEXTS)
        assert tokenizer.special_ids == llama3.special_ids
        assert tokenizer.eos_ids == llama3.eos_ids

    def test_qwen2_composes_characters(self) -> None:
        backend = build(_byte_level_metadata(pre="qwen2"))
        assert backend.encode("e\u0301").ids == backend.encode("\u00e9").ids

    def test_eos_is_added_if_the_file_requests_it(self) -> None:
        metadata = _byte_level_metadata(
            pre="gpt-2", bos_token_id=600, eos_token_id=603, add_eos_token=True
        )
        assert build(metadata).encode("").ids == [603]
        assert build({**metadata, "tokenizer.ggml.add_bos_token": True}).encode("").ids == [
            600,
            603,
        ]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"pre": "klingon"},
                "tokenizer.ggml.pre: 'klingon' is not supported; allowed: default,",
            ),
            ({"model": "t5"}, "tokenizer.ggml.model: 't5' is not supported; allowed: gpt2, llama"),
            ({"model": "gemma4"}, "tokenizer.ggml.model: 'gemma4' is not supported"),
            ({"model": None}, "tokenizer.ggml.model: None is not supported"),
            ({"tokens": []}, "tokenizer.ggml.tokens is missing or empty"),
            ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries for "),
            ({"merges": ["a"]}, "'a' is not two tokens"),
            ({"merges": ["a b c"]}, "'a b c' is not two tokens"),
            ({"merges": ["zz9 qq9"]}, "merges and tokens do not match"),
            ({"model": "llama"}, "tokenizer.ggml.scores must have one entry per token"),
        ],
    )
    def test_unsupported_values_are_named(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            build({**_byte_level_metadata(pre="gpt-2"), **_prefixed_keys(changes)})
        assert message in str(caught.value)


class TestSentencePieceGguf:
    def test_ids_are_those_of_the_naive_algorithm(self, sentencepiece: Tokenizer) -> None:
        pieces = sentencepiece.vocabulary()
        _, scores, types = sentencepiece_pieces()
        for text in TEXTS[::7]:
            right = _naive_bpe("\u2581" + text.replace(" ", "\u2581"), pieces, scores, types)
            assert plain(sentencepiece, text) == right

    def test_a_text_begins_with_bos_and_a_space(self, sentencepiece: Tokenizer) -> None:
        vocabulary = sentencepiece.vocabulary()
        piece = next(text for text in vocabulary if text[0] == "\u2581" and text[1:].isalpha())
        assert sentencepiece.encode(piece[1:]) == [1, vocabulary[piece]]
        assert sentencepiece.bos_id == 1

    def test_without_a_space_prefix_it_begins_as_it_is(self, sentencepiece_bare: Tokenizer) -> None:
        assert sentencepiece_bare.encode("a")[1:] == [sentencepiece_bare.vocabulary()["a"]]

    def test_text_never_becomes_a_control_or_a_byte_token(self, sentencepiece: Tokenizer) -> None:
        ids = sentencepiece.encode_pieces(["</s><unk><0x0A>", 2])
        byte_token = sentencepiece.vocabulary()["<0x0A>"]
        assert not {0, 1, 2, byte_token} & set(ids[:-1])

    def test_a_character_without_a_token_is_spelled_in_bytes(
        self, sentencepiece: Tokenizer
    ) -> None:
        ids = plain(sentencepiece, "a𠮷")
        assert [id_ - 3 for id_ in ids[-4:]] == list("𠮷".encode())

    def test_user_defined_runs_of_spaces_are_one_token(self, tmp_path: Path) -> None:
        """As SentencePiece finds Gemma's: where a space is U+2581, before any merge."""
        tokenizer = _load(_gemma_like(tmp_path))
        ids = tokenizer.vocabulary()
        two, three = ids["  "], ids["   "]
        assert plain(tokenizer, "a  b") == [ids["a"], two, ids["b"]]
        assert plain(tokenizer, " " * 5) == [three, two]
        assert plain(tokenizer, "\u2581 ") == [two]
        assert plain(tokenizer, "   \n\n") == [three, ids["\n\n"]]
        assert tokenizer.encode_pieces(["a  b"]) == plain(tokenizer, "a  b")

    def test_phi_3_s_tokens_take_the_white_space_behind_them(self, tmp_path: Path) -> None:
        path = _with_tokens(tmp_path, "phi3", {"<|user|>": 3, "<|endoftext|>": 3})
        tokenizer = _load(path)
        user, end = (tokenizer.vocabulary()[text] for text in ("<|user|>", "<|endoftext|>"))
        assert plain(tokenizer, "<|user|>\n a") == [user, *plain(tokenizer, "a")]
        assert plain(tokenizer, "<|endoftext|>\n") == [end, *plain(tokenizer, "\n")]
        assert tokenizer.encode_pieces([user, "\na"]) == [user, *plain(tokenizer, "a")]


class TestCache:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return sentencepiece_gguf(tmp_path / "model.gguf")

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return tmp_path / "cache" / "inflight" / "tokenizers"

    def test_the_second_load_does_not_read_the_file(
        self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = _load(path)
        monkeypatch.setattr(gguf, "GGUFReader", _must_not_be_called)
        second = _load(path)
        assert Tokenizer.load_if_present(locate(str(path))) is not None
        assert second.encode_batch(TEXTS[:9]) == first.encode_batch(TEXTS[:9])
        assert second.eos_ids == first.eos_ids
        assert [entry.name[0] for entry in folder.iterdir()].count(".") == 0

    def test_a_changed_file_is_read_again(self, path: Path, folder: Path) -> None:
        assert _load(path).encode("a")[0] == 1
        sentencepiece_gguf(path, add_bos_token=False)
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
        assert _load(path).encode("a")[0] != 1
        assert len(list(folder.iterdir())) == 2

    def test_a_broken_entry_is_replaced(self, path: Path, folder: Path) -> None:
        right = _load(path).encode("one")
        (entry,) = folder.iterdir()
        (entry / "tokenizer.json").write_text("{")
        assert _load(path).encode("one") == right
        assert json.loads((entry / "tokenizer.json").read_text("utf-8"))["model"]

    def test_a_cache_that_cannot_be_written_costs_only_time(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert _load(path).encode("a")[0] == 1

    def test_a_relative_cache_home_is_ignored(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        _load(path)
        assert len(list((tmp_path / "home/.cache/inflight/tokenizers").iterdir())) == 1

    def test_concurrent_writes_are_safe(self, path: Path, folder: Path) -> None:
        found: list[list[int]] = []

        def load() -> None:
            found.append(_load(path).encode(TEXTS[0]))

        threads = [threading.Thread(target=load) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [found[0]] * 6
        assert len(list(folder.iterdir())) == 1

    def test_concurrent_processes_may_write_it(self, path: Path, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        with context.Pool(2) as pool:
            found = pool.map(_encode_a, [path] * 4)
        assert found == [found[0]] * 4
        assert len(list(folder.iterdir())) == 1


class TestExport:
    def test_transformers_loads_the_converted_gguf_tokenizer(
        self, smollm: Tokenizer, smollm_checkpoint: Checkpoint, tmp_path: Path
    ) -> None:
        export(smollm_checkpoint, tmp_path / "new" / "folder")
        folder = tmp_path / "new" / "folder"
        right = transformers.AutoTokenizer.from_pretrained(folder)
        assert right(TEXTS)["input_ids"] == smollm.encode_batch(TEXTS)
        assert right.chat_template == smollm.chat_template
        assert (right.bos_token_id, right.eos_token_id) == (1, 2)
        config = transformers.AutoConfig.from_pretrained(folder)
        assert (config.model_type, config.vocab_size, config.hidden_size) == ("llama", 49152, 576)
        assert (config.num_hidden_layers, config.num_key_value_heads) == (30, 3)
        assert config.max_position_embeddings == 8192
        assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == 2

    def test_transformers_loads_a_sentencepiece_export(
        self, sentencepiece: Tokenizer, tmp_path: Path
    ) -> None:
        path = sentencepiece_gguf(tmp_path / "model.gguf")
        export(locate(str(path)), tmp_path / "out")
        right = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert right(TEXTS)["input_ids"] == sentencepiece.encode_batch(TEXTS)

    def test_a_folder_is_copied_without_its_weights(
        self, llama3_folder: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(llama3_folder, tmp_path / "in")
        (tmp_path / "in" / "model.safetensors").write_bytes(b"x")
        export(locate(str(tmp_path / "in")), tmp_path / "out")
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names == {"tokenizer.json", "tokenizer_config.json", "config.json"}
        export(locate(str(tmp_path / "in")), tmp_path / "in")  # onto itself: nothing changes
        assert _load(tmp_path / "in").encode("a") == _load(tmp_path / "out").encode("a")

    def test_a_directory_that_cannot_be_written_is_named(
        self, llama3_folder: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"file.*cannot be written"):
            export(locate(str(llama3_folder)), tmp_path / "file" / "out")


def test_a_gguf_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "model.gguf")
    templates = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    write_folder(path, read(path) | templates, tmp_path)
    found = _load(tmp_path)
    assert (found.chat_template, found.tool_chat_template) == ("a", "b")


def test_an_end_of_turn_is_found_by_its_text_in_a_gguf_file(tmp_path: Path) -> None:
    tokenizer = _load(_gemma_like(tmp_path))
    end = tokenizer.vocabulary()["<end_of_turn>"]
    assert tokenizer.eos_ids == (2, end)  # the file names 2 alone
    assert end in tokenizer.markers.values()


def test_a_gguf_file_without_a_template_has_its_family_s(tmp_path: Path) -> None:
    path = _gemma_like(tmp_path)
    template = _load(path).chat_template
    assert template is not None and "<start_of_turn>" in template
    write_folder(path, read(path) | {"tokenizer.chat_template": "own"}, tmp_path)
    assert _load(tmp_path).chat_template == "own"
    other = _with_tokens(tmp_path / "other", "llama", {"<start_of_turn>": 3, "<end_of_turn>": 3})
    assert _load(other).chat_template is None


def test_a_file_that_is_no_gguf_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"model\.gguf: not a GGUF file"):
        _load(path)
    with pytest.raises(ConfigError, match=r"gone\.gguf: cannot be read"):
        Tokenizer.load(Checkpoint(tmp_path / "gone.gguf", "gguf"))


def test_a_gguf_file_without_a_tokenizer_is_a_model_of_ids(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {})
    assert Tokenizer.load_if_present(locate(str(path))) is None
    with pytest.raises(ConfigError, match=r"model\.gguf: tokenizer\.ggml\.model: None"):
        _load(path)


def test_the_decoder_is_reported_as_in_the_file(llama3: Tokenizer) -> None:
    assert llama3.decoder is not None
    assert llama3.decoder["type"] == type(library_decoders.ByteLevel()).__name__


def _gemma_like(folder: Path) -> Path:
    more = {"<start_of_turn>": 3, "<end_of_turn>": 3, "  ": 4, "   ": 4, "\n\n": 4}
    return _with_tokens(folder, "gemma3", more, add_space_prefix=False)


def _with_tokens(folder: Path, architecture: str, more: dict[str, int], **changes: object) -> Path:
    """The SentencePiece GGUF file with further tokens: text -> type."""
    folder.mkdir(exist_ok=True)
    tokens, scores, types = sentencepiece_pieces()
    return sentencepiece_gguf(
        folder / "model.gguf",
        architecture,
        tokens=[*tokens, *more],
        scores=[*scores, *([0.0] * len(more))],
        token_type=[*types, *more.values()],
        **changes,
    )


def _load(path: Path) -> Tokenizer:
    return Tokenizer.load(locate(str(path)))


def _encode_a(path: Path) -> list[int]:
    return _load(path).encode("a")


def _must_not_be_called(*_: object) -> None:
    raise AssertionError("the GGUF file was read again")


def _byte_level_metadata(**changes: object) -> dict[str, object]:
    """The metadata of vocabularies.byte_level as a converter writes it."""
    library = byte_level()
    vocabulary = library.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    added = library.get_added_tokens_decoder()
    merges = json.loads(library.to_str())["model"]["merges"]
    types = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    metadata = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": types,
        "merges": [f"{left} {right}" for left, right in merges],
    }
    return _prefixed_keys({**metadata, **changes})


def _prefixed_keys(changes: dict[str, object]) -> dict[str, object]:
    return {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _prefixed(metadata: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in metadata.items() if value is not None}


def _naive_bpe(
    text: str, pieces: dict[str, int], scores: list[float], types: list[int]
) -> list[int]:
    """SentencePiece's BPE by definition: join the best pair of neighbours until none is left."""
    parts = list(text)
    while True:
        pairs = [
            (-scores[pieces[left + right]], i)
            for i, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in pieces and types[pieces[left + right]] == 1
        ]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [pieces[part]] if part in pieces else [3 + byte for byte in part.encode()]
    return ids

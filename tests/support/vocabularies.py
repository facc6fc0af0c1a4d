"""Small tokenizers of the two families, as checkpoints."""

import functools
import json
from pathlib import Path

import gguf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from texts import TEXTS

# Like Llama 3's: a header for each turn, contents trimmed, BOS once.
LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('only some roles') }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@functools.cache
def byte_level() -> Tokenizer:
    """A byte-level BPE of 600 tokens, with special tokens beyond the model's vocabulary."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _LLAMA3_SPECIAL]
    )
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    return tokenizer


def byte_level_folder(folder: Path, **config: object) -> Path:
    """`byte_level` as a Hugging Face folder; config goes into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"content": "<|eot_id|>", "__type": "AddedToken"},
        "chat_template": LLAMA3_TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    eos = tokenizer.token_to_id("<|eot_id|>")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": eos}))
    return folder


@functools.cache
def sentencepiece_pieces() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as a SentencePiece BPE model of about 800 pieces has them."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(vocab_size=700, limit_alphabet=80, show_progress=False)
    trained.train_from_iterator(TEXTS, trainer)
    vocabulary = trained.get_vocab()
    ordered = sorted(vocabulary, key=lambda token: vocabulary[token])
    merged = [token for token in ordered if len(token) > 1]
    letters = [token for token in ordered if len(token) == 1]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *merged, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(letters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(letters))
    return tokens, scores, types


def sentencepiece_gguf(path: Path, architecture: str = "llama", **changes: object) -> Path:
    """`sentencepiece_pieces` as a GGUF file without tensors.

    Args:
        path: of the file.
        architecture: general.architecture.
        changes: key without `tokenizer.ggml.` -> another value; None leaves the key out.
    """
    tokens, scores, types = sentencepiece_pieces()
    metadata: dict[str, object] = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "add_space_prefix": True,
    }
    metadata.update(changes)
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return write_gguf(path, keys, architecture)


def write_gguf(path: Path, metadata: dict[str, object], architecture: str = "llama") -> Path:
    """A GGUF file that has metadata and no tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""Tiny random checkpoints of any family, made by transformers, with its logits as reference.

Zeros hide bugs: norms are near 1, biases are not 0, heads are not hidden_size / num_heads wide, and
texts are longer than the windows.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import family_engine
import family_gpu
import latents
import tiny
import tiny_gguf
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.errors import ConfigError
from inflight.models import gpu_support
from inflight.models.decoder_cpu import Decoder, TableInputs
from inflight.models.registry import read_spec
from inflight_kernels.torch_ops.transformer import AttentionPlan

BLOCK_SIZE = 4
NUM_TOKENS = 48
WINDOW = 8
SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ABSENT = object()


def make(
    config: transformers.PretrainedConfig,
    seed: int = 0,
    deviation: float = 0.2,
    norm_mean: float = 1.0,
) -> Any:
    """A model of transformers with random weights of this standard deviation, in float32."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=random)
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(norm_mean + 0.1 * values if is_norm else deviation * values)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(deviation * torch.randn(buffer.shape, generator=random))
    return model.eval().float()


def tokens(count: int = NUM_TOKENS, seed: int = 1) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(3, SHAPE["vocab_size"], (count,), generator=random).tolist()
    return found


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """[T, vocab_size] of transformers."""
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def write_folder(model: Any, folder: Path, old_spelling: bool = False) -> Checkpoint:
    """A Hugging Face folder, or one whose settings are spelled as before transformers 5."""
    model.save_pretrained(folder)
    if old_spelling:
        path = folder / "config.json"
        settings = json.loads(path.read_text())
        rope = settings.pop("rope_parameters")
        if "sliding_attention" in rope:
            settings["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        settings["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            settings["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if rope["rope_type"] != "default":
            settings["rope_scaling"] = rope
        settings.pop("layer_types", None)
        path.write_text(json.dumps(settings))
    return Checkpoint(folder, "huggingface")


def write_gguf(
    model: Any,
    path: Path,
    architecture: str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Checkpoint:
    """The same weights as a GGUF file, with further tensors and keys."""
    settings = {"rms_norm_eps": 1e-5} | model.config.to_dict()
    rope = settings["rope_parameters"]
    settings["rope_theta"] = rope.get("full_attention", rope)["rope_theta"]
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and settings["tie_word_embeddings"])
    }
    heads = settings["num_attention_heads"]
    settings.setdefault("head_dim", settings["hidden_size"] // heads)
    changes = {key: settings[key] for key in (*SHAPE, "rope_theta")}
    if "rms_norm_eps" not in model.config.to_dict():
        metadata |= {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
    # Older files have neither the key nor tensors of their own.
    is_split = "attention.key_length_mla" in metadata
    return tiny_gguf.write_gguf(
        path,
        kind,
        weights=weights,
        extra=extra,
        architecture=architecture,
        metadata=metadata,
        up_dims=latents.head_dims(settings) if is_split else None,
        **changes,
    )


Span = tuple[int, int, int]
"""A text by its number, and the range of its tokens that a step computes."""

AT_ONCE: list[list[Span]] = [[(0, 0, NUM_TOKENS)], [(1, 0, NUM_TOKENS)]]
TOKEN_BY_TOKEN: list[list[Span]] = [[(0, i, i + 1), (1, i, i + 1)] for i in range(NUM_TOKENS)]
MIXED: list[list[Span]] = [
    [(0, 0, 5), (1, 0, 10)],
    [(0, 5, 18), (1, 10, 11)],
    [(1, 11, 12), (0, 18, 19)],
    [(0, 19, NUM_TOKENS), (1, 12, 13)],
    [(1, 13, NUM_TOKENS)],
]


KEPT_TOLERANCE = 5e-3
"""Of logits with weights that keep 8 bits, as `relative_rms`: inputs and scales are rounded."""


@torch.inference_mode()
def our_logits(
    checkpoint: Checkpoint,
    texts: list[list[int]],
    steps: list[list[Span]],
    max_len: int = 64,
    quantization: Quantization = "auto",
) -> list[Tensor]:
    """[T, vocab_size] of each text by our decoder on the CPU, computed in these steps over a paged
    cache whose blocks are in no order."""
    model = _decoder(checkpoint, max_len, quantization)
    return _compute(model, texts, steps)


@torch.inference_mode()
def our_features(checkpoint: Checkpoint, text: list[int], layers: tuple[int, ...]) -> Tensor:
    """[T, len(layers) * hidden_size], the inputs of these layers."""
    model = _decoder(checkpoint, max_len=64)
    model.set_aux_layers(layers)
    _compute(model, [text], [[(0, 0, len(text))]])
    assert model.features is not None
    return model.features


def _decoder(checkpoint: Checkpoint, max_len: int, quantization: Quantization = "auto") -> Decoder:
    spec = read_spec(checkpoint)
    return Decoder(
        checkpoint, spec, torch.float32, max_len, lambda what, fraction: None, quantization
    )


def _compute(model: Decoder, texts: list[list[int]], steps: list[list[Span]]) -> list[Tensor]:
    blocks = -(-max(map(len, texts)) // BLOCK_SIZE)
    cache = tiny.make_cache(model.spec, len(texts) * blocks, BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(len(texts) * blocks)
    tables = order.reshape(len(texts), blocks)
    found = [torch.full((len(text), model.spec.vocab_size), torch.nan) for text in texts]
    for spans in steps:
        owners = np.concatenate([np.full(end - start, text) for text, start, end in spans])
        positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
        slots = tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        starts = np.cumsum([0, *[end - start for _, start, end in spans]])
        plan = AttentionPlan(
            tables[[text for text, _, _ in spans]],
            starts,
            np.array([end for _, _, end in spans]),
            BLOCK_SIZE,
        )
        logits = model.forward(
            torch.tensor([texts[owner][at] for owner, at in zip(owners, positions, strict=True)]),
            torch.from_numpy(positions),
            [TableInputs(torch.from_numpy(slots), plan)],
            torch.arange(len(positions)),
            cache,
        )
        for (text, start, end), (a, b) in zip(spans, itertools.pairwise(starts), strict=True):
            found[text][start:end] = logits[a:b]
    return found


def relative_rms(found: Tensor, expected: Tensor) -> float:
    """Root mean square of differences, relative to that of what is expected."""
    difference = (found.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())


def check(
    checkpoint: Checkpoint,
    model: Any,
    steps: list[list[Span]] = MIXED,
    max_len: int = 64,
    quantization: Quantization = "auto",
) -> None:
    """Our logits are those of transformers."""
    texts = [tokens(seed=1), tokens(seed=2)]
    found = our_logits(checkpoint, texts, steps, max_len, quantization)
    for ours, text in zip(found, texts, strict=True):
        reference = reference_logits(model, text)
        # Relative to their spread, since logits may be scaled down.
        spread = min(1.0, float(reference.std()))
        torch.testing.assert_close(ours, reference, rtol=2e-4, atol=2e-4 * spread)


@dataclass(frozen=True)
class Written:
    """A model of transformers, which no test may change, and its Hugging Face folder."""

    model: Any
    checkpoint: Checkpoint


_WRITTEN: dict[tuple[type, str], Written] = {}


class Suite:
    """What every family must show. A test class of a family derives from it.

    Attributes:
        config: transformers' class of settings.
        variants: changes of SHAPE, by the name of the case; ABSENT leaves a key out.
        architecture: of GGUF files.
        norm_mean: mean of the norms' weights.
        on_gpu: whether there are kernels for all variants.
        rounding_tolerance: of logprobs, if a value of 8 bits is rounded the other way.
        stands_for_others: whether `make test` runs its cases in which families share all but their
            decoders, both types of 8 bits and constrained texts of weights in 32; else they are
            `long`.
    """

    config: type[transformers.PretrainedConfig]
    variants: ClassVar[dict[str, dict[str, Any]]] = {"default": {}}
    architecture: str
    norm_mean = 1.0
    on_gpu = True
    rounding_tolerance = 0.05
    stands_for_others = False

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "changes" in metafunc.fixturenames:
            metafunc.parametrize("changes", self.variants.values(), ids=list(self.variants))
        if "changes_of_some" in metafunc.fixturenames:
            name, *others = self.variants
            metafunc.parametrize(
                "changes_of_some",
                [
                    pytest.param(self.variants[name], id=name),
                    *(
                        pytest.param(self.variants[one], id=one, marks=pytest.mark.long)
                        for one in others
                    ),
                ],
            )
        name, changes = next(iter(self.variants.items()))
        if "changes_of_first" in metafunc.fixturenames:
            metafunc.parametrize("changes_of_first", [changes], ids=[name])
        marks = () if self.stands_for_others else (pytest.mark.long,)
        if "changes_if_chosen" in metafunc.fixturenames:
            chosen = pytest.param(changes, id=name, marks=marks)
            metafunc.parametrize("changes_if_chosen", [chosen])
        if "quantization" in metafunc.fixturenames:
            metafunc.parametrize("quantization", ["fp8", pytest.param("int8", marks=marks)])

    def metadata(self, config: Any) -> dict[str, Any]:
        """Keys of a GGUF file beyond Llama's, as llama.cpp's converter writes them."""
        return {}

    def extra(self, config: Any) -> dict[str, np.ndarray]:
        """Further tensors of a GGUF file."""
        return {}

    def make(self, changes: dict[str, Any]) -> Any:
        settings = SHAPE | {"pad_token_id": 0} | changes
        settings = {key: value for key, value in settings.items() if value is not ABSENT}
        return make(self.config(**settings), norm_mean=self.norm_mean)

    def written(self, changes: dict[str, Any], folders: pytest.TempPathFactory) -> Written:
        """Written by the first test that needs it."""
        key = (type(self), repr(changes))
        if key not in _WRITTEN:
            model = self.make(changes)
            _WRITTEN[key] = Written(model, write_folder(model, folders.mktemp("model")))
        return _WRITTEN[key]

    @pytest.mark.parametrize(
        "steps",
        [
            pytest.param(MIXED, id="mixed"),
            pytest.param(TOKEN_BY_TOKEN, id="tokens"),
            # The others have prompts at once as well.
            pytest.param(AT_ONCE, id="once", marks=pytest.mark.long),
        ],
    )
    def test_logits_equal_those_of_transformers(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        changes: dict[str, Any],
        steps: list[list[Span]],
    ) -> None:
        found = self.written(changes, tmp_path_factory)
        check(found.checkpoint, found.model, steps)

    def test_the_old_spelling_of_the_settings_means_the_same(
        self, tmp_path: Path, changes: dict[str, Any]
    ) -> None:
        model = self.make(changes)
        check(write_folder(model, tmp_path, old_spelling=True), model)

    @pytest.mark.parametrize("kind", ["F32", "Q8_0"])
    def test_logits_of_a_gguf_file_equal_those_of_transformers(
        self, tmp_path: Path, changes: dict[str, Any], kind: str
    ) -> None:
        model = self.make(changes)
        type_ = gguf.GGMLQuantizationType[kind]
        up_dims = latents.head_dims(model.config.to_dict())
        model.load_state_dict(tiny_gguf.rounded(model.state_dict(), type_, up_dims))
        checkpoint = write_gguf(
            model,
            tmp_path / "x.gguf",
            self.architecture,
            type_,
            self.extra(model.config),
            **self.metadata(model.config),
        )
        check(checkpoint, model, quantization="none")
        text = tokens(seed=1)
        (kept,) = our_logits(checkpoint, [text], [[(0, 0, len(text))]])
        assert relative_rms(kept, reference_logits(model, text)) < KEPT_TOLERANCE

    def test_the_decoder_of_gpus_computes_the_same(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        changes: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """With the kernels' definitions in the kernels' place; or else it refuses the model."""
        found = self.written(changes, tmp_path_factory)
        family_gpu.install(monkeypatch)
        if gpu_support.gpu_obstacle(read_spec(found.checkpoint), family_gpu.MAX_LEN):
            assert not self.on_gpu
            with pytest.raises(ConfigError, match="not supported on GPUs; use device: cpu"):
                family_gpu.decoder(found.checkpoint)
        else:
            family_gpu.check(family_gpu.decoder(found.checkpoint), found.model)

    def test_greedy_texts_and_prompt_logprobs_equal_those_of_transformers(
        self, tmp_path_factory: pytest.TempPathFactory, changes_of_some: dict[str, Any]
    ) -> None:
        """With drafts, a prefix cache and prompts in chunks."""
        found = self.written(changes_of_some, tmp_path_factory)
        model = found.model
        speculation = family_engine.self_drafting(model.config.num_hidden_layers)
        engine = family_engine.make_engine(found.checkpoint, speculation)
        family_engine.check_texts(engine, model, model.config.vocab_size)
        stats = engine.stats()
        assert stats.num_accepted_tokens == stats.num_drafted_tokens > 0

    def test_an_eagle3_head_leaves_no_trace_in_greedy_texts(
        self,
        tmp_path: Path,
        tmp_path_factory: pytest.TempPathFactory,
        changes_of_first: dict[str, Any],
    ) -> None:
        found = self.written(changes_of_first, tmp_path_factory)
        model = found.model
        speculation = family_engine.eagle3(tmp_path / "head", model.config.to_dict())
        engine = family_engine.make_engine(found.checkpoint, speculation)
        family_engine.check_texts(engine, model, model.config.vocab_size)
        assert engine.stats().num_drafted_tokens > 0

    def test_features_of_layers_equal_those_of_transformers(
        self, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
    ) -> None:
        """What a head of EAGLE-3 reads."""
        found = self.written(changes, tmp_path_factory)
        model = found.model
        layers = (0, 1, model.config.num_hidden_layers - 1)
        ours = our_features(found.checkpoint, tokens(), layers)
        with torch.inference_mode():
            states = model(torch.tensor([tokens()]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0] for layer in layers], -1)
        torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-4)

    def test_a_constrained_text_matches_its_constraint(
        self,
        tmp_path: Path,
        tmp_path_factory: pytest.TempPathFactory,
        changes_if_chosen: dict[str, Any],
    ) -> None:
        changes = changes_if_chosen | {"vocab_size": family_engine.VOCAB_SIZE}
        found = self.written(changes, tmp_path_factory)
        tokenizer = family_engine.tokenizer(tmp_path / "tokenizer")
        speculation = family_engine.self_drafting(found.model.config.num_hidden_layers)
        engine = family_engine.make_engine(found.checkpoint, speculation, tokenizer)
        family_engine.check_constrained_text(engine, tokenizer)

    def test_drafts_and_constraints_work_with_layers_and_keys_of_8_bits(
        self,
        tmp_path: Path,
        tmp_path_factory: pytest.TempPathFactory,
        changes_of_first: dict[str, Any],
        quantization: str,
    ) -> None:
        changes = changes_of_first | {"vocab_size": family_engine.VOCAB_SIZE}
        found = self.written(changes, tmp_path_factory)
        model = found.model
        tokenizer = family_engine.tokenizer(tmp_path / "tokenizer")
        plain, drafting = (
            family_engine.make_engine(
                found.checkpoint,
                speculation,
                tokenizer,
                quantization=quantization,
                kv_cache_dtype=quantization,
            )
            for speculation in (
                None,
                family_engine.self_drafting(model.config.num_hidden_layers),
            )
        )
        texts = family_engine.greedy_texts(drafting, model.config.vocab_size)
        assert drafting.stats().num_accepted_tokens > 0
        # In a step of another size a value may be rounded the other way.
        vocab_size, tolerance = model.config.vocab_size, self.rounding_tolerance
        family_engine.check_greedy(plain, vocab_size, texts, tolerance)
        family_engine.check_constrained_text(drafting, tokenizer)

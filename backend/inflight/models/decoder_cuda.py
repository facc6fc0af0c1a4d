"""Decoder on a GPU: executes a model's spec with the kernels, in fixed buffers, independently of
its family.

A step allocates nothing and does not synchronise with the host, so it can be captured in a CUDA
graph. After the last layer's attention only the rows that need logits are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.config import Dtype, KVDtype, Quantization
from inflight.core.step_size import StepSize
from inflight.errors import ConfigError
from inflight.kv.cache import KVCache
from inflight.models.cuda_placement import CudaPlacement
from inflight.models.experts_cuda import (
    CudaExperts,
    CudaMoe,
    MoeMemory,
)
from inflight.models.gpu_support import gpu_obstacle
from inflight.models.layers.attention import (
    Attention,
    ForwardInputs,
    LayerPass,
    PassLimits,
    RotaryTables,
    max_dequantized_keys,
)
from inflight.models.layers.latent import LatentAttention, LatentLayer
from inflight.models.layers.linear import CudaSublayer, CudaWeight, whole_tiles
from inflight.models.layers.norm import NormWeights
from inflight.models.layers.residual import ResidualStream, residual_stream
from inflight.models.layers.weights import LayerWeights, MlpWeights, ModelWeights, MoeWeights
from inflight.models.linear.scaled_cuda import QuantizedInputs
from inflight.models.linear.weight_only_cuda import DequantizedWeight
from inflight.models.loader import Progress, load_weights
from inflight.models.quantization.choice import gpu_format, rounds_weights
from inflight.models.spec import Activation, AttentionSpec, MlpSpec, ModelSpec, MoeSpec
from inflight_kernels.ops import activation
from inflight_kernels.ops.attention.operands import AttentionWeights
from inflight_kernels.ops.embedding import embedding
from inflight_kernels.ops.latent.operands import LatentNorm
from inflight_kernels.ops.linear.operands import Input, Operand
from inflight_kernels.ops.logits import scale_cap
from inflight_kernels.ops.residual_norm import norm_columns
from inflight_kernels.ops.rope import PagedKV, QkNorm
from inflight_kernels.runtime.launch import is_hopper

_DTYPE_NAMES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """How a model runs on a GPU.

    Attributes:
        dtype: of weights and activations.
        device: the GPU.
        max_len: maximum sequence length; the size of the rotary tables.
        max_tokens: maximum T.
        max_rows: maximum n and s.
        batch_invariant: results for a token do not depend on the other tokens of its step.
        quantization: of linear layers, as in settings.
        kv_cache_dtype: of keys and values; `auto` for `dtype`.
    """

    dtype: torch.dtype
    device: torch.device
    max_len: int
    max_tokens: int
    max_rows: int
    batch_invariant: bool = False
    quantization: Quantization = "auto"
    kv_cache_dtype: KVDtype = "auto"

    @property
    def limits(self) -> PassLimits:
        """Of passes."""
        return PassLimits(self.max_tokens, self.max_rows, self.max_len)

    @property
    def kv_dtype(self) -> KVDtype:
        """Of keys and values, as settings name it."""
        return _DTYPE_NAMES[self.dtype] if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def quantized_kv(self) -> torch.dtype | None:
        """Of keys and values of 8 bits; None if they are in `dtype`."""
        return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(self.kv_dtype)

    @property
    def max_prompt_keys(self) -> int | None:
        """Keys of prompts that a step dequantises at most; None without a KV cache of 8 bits."""
        if self.quantized_kv is None:
            return None
        return max_dequantized_keys(self.max_len, self.max_tokens)


def check_supported(spec: ModelSpec, path: Path, settings: DecoderSettings) -> None:
    """Check that the kernels support a model.

    Args:
        spec: of the model.
        path: of its checkpoint, for the error.
        settings: how it is to run.

    Raises:
        ConfigError: they do not.
    """
    obstacle = gpu_obstacle(spec, settings.max_len, is_hopper())
    if obstacle is not None:
        raise ConfigError(f"{path}: {obstacle}; use device: cpu")
    if settings.quantized_kv is not None and any(one.latent for one in spec.attentions):
        raise ConfigError(
            f"kv_cache_dtype: {settings.kv_cache_dtype} is not supported on GPUs with latent "
            "attention; allowed: auto. Or use device: cpu"
        )


def _attention_weights(
    own: LayerWeights[CudaWeight, CudaExperts], spec: ModelSpec, index: int
) -> AttentionWeights | LatentLayer:
    """What attention takes; of the norms of q and k, kernels have that of each head."""
    q_norm, k_norm = own.q_norm, own.k_norm
    latent, of_layer = own.latent, spec.layers[index].attention.latent
    if latent is not None and of_layer is not None:
        return LatentLayer(
            LatentNorm(latent.kv_norm.weight, of_layer.norm_eps),
            latent.k_up,
            latent.v_up,
            None if latent.q_norm is None else latent.q_norm.weight,
            latent.q_b,
        )
    if spec.layers[index].attention.qk_norm != "head" or q_norm is None or k_norm is None:
        return AttentionWeights(None, own.sinks)
    return AttentionWeights(QkNorm(q_norm.weight, k_norm.weight, spec.norm_eps), own.sinks)


def _attention(
    spec: AttentionSpec, tables: RotaryTables, settings: DecoderSettings
) -> Attention | LatentAttention:
    """What the layers with one spec share."""
    of_rope, invariant, limits = tables.of(spec.rope), settings.batch_invariant, settings.limits
    if spec.latent is not None:
        return LatentAttention(
            spec, of_rope, limits, batch_invariant=invariant, dtype=settings.dtype
        )
    return Attention(
        spec,
        of_rope,
        limits,
        batch_invariant=invariant,
        dtype=settings.dtype,
        kv_dtype=settings.quantized_kv,
    )


_ACTIVATIONS: dict[tuple[Activation, bool], Callable[..., None]] = {
    ("gelu_tanh", True): activation.gelu_tanh_mul,
    ("gelu_tanh", False): activation.gelu_tanh,
    ("relu2", False): activation.relu2,
}
"""Kernels by activation, and whether there is a gate, apart from the fused one."""


def _quantized_memory(
    checkpoint: Checkpoint, spec: ModelSpec, settings: DecoderSettings
) -> QuantizedInputs | DequantizedWeight | None:
    """Memory of linear layers whose weights keep 8 bits; see `CudaPlacement`."""
    found = gpu_format(checkpoint, settings.quantization, is_hopper())
    if not found.dtypes:
        return None
    if found.weight_only:
        return DequantizedWeight(spec.largest_matrix_elements, settings.dtype, settings.device)
    width = max(
        spec.hidden_size,
        *(layer.attention.out_width for layer in spec.layers),
        *(latent.q_rank for one in spec.attentions if (latent := one.latent) is not None),
        *(mlp.width for mlp in _dense_mlps(spec)),
    )
    return QuantizedInputs(whole_tiles(settings.max_tokens), width, settings.device)


def _placed_quantization(checkpoint: Checkpoint, quantization: Quantization) -> Quantization:
    """The setting for weights as they are stored: those of 4 bits are not rounded again."""
    rounds = quantization != "int4" or rounds_weights(checkpoint, quantization)
    return quantization if rounds else "auto"


def _groups_memory(
    checkpoint: Checkpoint, spec: ModelSpec, settings: DecoderSettings
) -> DequantizedWeight | None:
    """Memory of linear layers that keep codes with scales of groups; see `CudaPlacement`."""
    found = gpu_format(checkpoint, settings.quantization, is_hopper())
    if not found.keeps_groups or settings.dtype != torch.bfloat16:
        return None
    return DequantizedWeight(spec.largest_matrix_elements, settings.dtype, settings.device)


def _dense_mlps(spec: ModelSpec) -> list[MlpSpec]:
    """Those of layers, and the experts of all tokens."""
    mlps = [
        layer.mlp.shared if isinstance(layer.mlp, MoeSpec) else layer.mlp for layer in spec.layers
    ]
    return [mlp for mlp in dict.fromkeys(mlps) if mlp is not None]


class MlpBuffers(NamedTuple):
    """Of one shape of feed-forward parts.

    Attributes:
        gate_up: gate | up, or up alone if there is no gate.
        gated: after the activation.
    """

    gate_up: Tensor
    gated: Tensor


class Buffers:
    """Activation buffers shared by all layers, [rows, width] each.

    Args:
        spec: of the model, whose layers' attention is of one shape.
        num_rows: maximum number of tokens; rounded up to a multiple of INVARIANT_ROWS.
        settings: of the model.
    """

    def __init__(self, spec: ModelSpec, num_rows: int, settings: DecoderSettings) -> None:
        self.num_rows = whole_tiles(num_rows)
        self._settings = settings
        layer = spec.layers[0]
        self.normed = self.new(spec.hidden_size)
        self.qkv = self.new(layer.attention.qkv_width)
        self.attended = self.new(layer.attention.out_width)
        self.mlp = {
            mlp: MlpBuffers(self.new((1 + mlp.gated) * mlp.width), self.new(mlp.width))
            for mlp in dict.fromkeys(layer.mlp for layer in spec.layers)
            if isinstance(mlp, MlpSpec)
        }

    def new(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        settings = self._settings
        return torch.zeros(
            self.num_rows, width, dtype=dtype or settings.dtype, device=settings.device
        )


class Decoder:
    """The weights of one model on a GPU, and the activation buffers of its steps.

    Args:
        checkpoint: where the weights are.
        spec: of the model.
        settings: how it runs.
        progress: called with ("weights", fraction) as layers are loaded.

    Attributes:
        weights: of the model.
        logits: [max_rows or more, vocab_size] float32, the last step's in its first rows.
        features: [max_tokens or more, len(aux_layers) * hidden_size], the last step's in its first
            rows; None without auxiliary layers.

    Raises:
        ConfigError: the weights are corrupt or do not match the spec, or its shape is not supported
            on GPUs.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        settings: DecoderSettings,
        progress: Progress,
    ) -> None:
        check_supported(spec, checkpoint.path, settings)
        self.spec = spec
        self.settings = settings
        self.features: Tensor | None = None
        self._aux_layers: dict[int, list[Tensor]] = {}
        dtype, device = settings.dtype, settings.device
        placement = CudaPlacement(
            dtype,
            device,
            settings.batch_invariant,
            _placed_quantization(checkpoint, settings.quantization),
            _quantized_memory(checkpoint, spec, settings),
            _groups_memory(checkpoint, spec, settings),
        )
        self.weights: ModelWeights[CudaWeight, CudaExperts, Tensor] = load_weights(
            checkpoint,
            spec,
            placement,
            progress,
            device,
            balances_keys=settings.kv_dtype == "int8",
        )
        self._valid_tokens = placement.valid_tokens
        self._buffers = Buffers(spec, settings.max_tokens, settings)
        self._moes = self._mixtures()
        # Buffers of the last layer, which is computed only for the sampled rows.
        rows = whole_tiles(settings.max_rows)
        self._last_attended = self._buffers.attended.new_zeros(
            rows, self._buffers.attended.shape[1]
        )
        self._last_normed = self._buffers.normed.new_zeros(rows, spec.hidden_size)
        self.logits = torch.zeros(rows, spec.vocab_size, dtype=torch.float32, device=device)
        tables = RotaryTables(spec, settings.max_len, device)
        self._attentions = [_attention(one, tables, settings) for one in spec.attentions]
        # By layer; a pass does not hash specs.
        self._attention_of = [spec.attentions.index(layer.attention) for layer in spec.layers]
        # By attention spec: its layers have the same window, and so the same block table.
        self._first_layer_of = [
            self._attention_of.index(index) for index in range(len(spec.attentions))
        ]
        self._attention_weights = [
            _attention_weights(own, spec, index) for index, own in enumerate(self.weights.layers)
        ]
        self._residual, self._last = (
            residual_stream(spec, count, dtype, device)
            for count in (len(self._buffers.normed), rows)
        )

    def _mixtures(self) -> list[CudaMoe | None]:
        """By layer; None for those with a dense feed-forward part."""
        spec, settings = self.spec, self.settings
        memories: dict[tuple[MoeSpec, torch.dtype, int], MoeMemory] = {}
        found: list[CudaMoe | None] = []
        for layer, own in zip(spec.layers, self.weights.layers, strict=True):
            if not (isinstance(layer.mlp, MoeSpec) and isinstance(own.mlp, MoeWeights)):
                found.append(None)
                continue
            experts, rows = own.mlp.experts, self._buffers.num_rows
            key = layer.mlp, experts.input_dtype, experts.count
            memory = memories.get(key)
            if memory is None:
                memory = MoeMemory(
                    layer.mlp,
                    spec.hidden_size,
                    rows,
                    settings.dtype,
                    experts.input_dtype,
                    settings.device,
                    experts.count - layer.mlp.num_experts,
                )
                memories[key] = memory
            found.append(CudaMoe(layer.mlp, own.mlp, memory, settings.batch_invariant))
        return found

    def set_aux_layers(self, layers: tuple[int, ...]) -> None:
        """Keep the input hidden states of these layers, concatenated, in `features`; num_layers
        denotes the last layer's output.
        """
        width, normed = self.spec.hidden_size, self._buffers.normed
        self.features = normed.new_zeros(len(normed), len(layers) * width)
        for place, layer in enumerate(layers):
            columns = slice(place * width, (place + 1) * width)
            self._aux_layers.setdefault(layer, []).append(self.features[:, columns])

    def forward(
        self,
        inputs: ForwardInputs,
        size: StepSize,
        cache: KVCache,
        num_layers: int | None = None,
    ) -> None:
        """Run a step: write its keys and values into the cache and compute `logits`.

        Args:
            inputs: of the step.
            size: of the step, T, n and s; s = T for logits of every token.
            cache: of all layers; updated in place.
            num_layers: run only so many layers, then the final norm and the head; None for all.
        """
        spec, weights, buffers = self.spec, self.weights, self._buffers
        num_tokens, num_rows = size.num_tokens, size.num_rows
        last = (num_layers or spec.num_layers) - 1
        aux_layers = self._aux_layers if num_layers is None else {}
        # After its keys and values, the last layer is computed only for these rows.
        num_kept = num_tokens if spec.num_layers in aux_layers else num_rows
        normed, qkv = buffers.normed[:num_tokens], buffers.qkv[:num_tokens]
        residual = self._residual

        self._valid_tokens.count = inputs.num_tokens
        residual.begin(inputs.token_ids[:num_tokens], weights.embedding)
        block_size = cache.block_size if size.shares_prefixes else None
        passes: list[LayerPass] = []
        for shared, first in zip(self._attentions, self._first_layer_of, strict=True):
            table = cache.table_of[first]
            passes.append(shared.begin(inputs, size, table, block_size, bool(passes)))
        layers = zip(
            *(weights.layers, self._attention_of, self._attention_weights, cache.layers),
            strict=True,
        )
        for index, (own, which, learned, pair) in enumerate(islice(layers, last + 1)):
            sums = own.qkv.sums(num_tokens)
            x = self._norm(residual, own.attention_norm, own.qkv, num_tokens, sums=sums)
            own.qkv.product(x, buffers.qkv, num_tokens)
            for aux in aux_layers.get(index, ()):
                aux[:num_tokens].copy_(residual.hidden[:num_tokens])
            self._norm_whole_rows(own, spec.layers[index].attention, qkv)
            kv = PagedKV(*pair)
            if index == last and not num_kept:
                passes[which].write(buffers.qkv, kv, learned)
                return
            kept, num_left = None, num_tokens
            if index == last and num_kept < num_tokens:
                kept = inputs.sample_rows[:num_kept]
            attended = self._attend(passes[which], kv, learned, own.out, num_tokens, kept)
            if kept is not None:
                num_left, residual = num_kept, self._last
                residual.take(kept, self._residual, num_tokens)
                if spec.layers[index].parallel:
                    x = self._last_normed
                    embedding(kept, normed, out=x[:num_kept], pdl=True)
            self._end_block(index, attended, x, residual, num_left)

        self._score(inputs, residual, num_kept, num_rows, aux_layers.get(spec.num_layers, ()))

    def _attend(
        self,
        own: LayerPass,
        kv: PagedKV,
        learned: AttentionWeights | LatentLayer,
        out: CudaWeight,
        num_tokens: int,
        kept: Tensor | None,
    ) -> Operand:
        """A layer's attention of all T tokens, or of those `kept` alone, as `out` takes it: an
        entire buffer, or quantised."""
        qkv, attended, last = self._buffers.qkv, self._buffers.attended, self._last_attended
        if kept is None:
            return own.layer(qkv, kv, attended, learned, out)
        if not own.rows(qkv, kv, kept, last, learned):
            own.layer(qkv, kv, attended, learned)
            embedding(kept, attended[:num_tokens], out=last[: len(kept)], pdl=True)
        return last

    def _score(
        self,
        inputs: ForwardInputs,
        residual: ResidualStream,
        num_kept: int,
        num_rows: int,
        features: Sequence[Tensor],
    ) -> None:
        """Logits of the sampled rows, after the last layer was computed for num_kept rows, and the
        layer's output as features."""
        spec, weights = self.spec, self.weights
        normed, last_normed = self._buffers.normed[:num_kept], self._last_normed[:num_rows]
        if num_kept == num_rows:
            residual.norm(weights.norm, last_normed)
        else:
            residual.norm(weights.norm, normed)
            embedding(inputs.sample_rows[:num_rows], normed, out=last_normed, pdl=True)
        for aux in features:
            aux[:num_kept].copy_(residual.hidden[:num_kept])
        if num_rows:
            weights.head.product(self._last_normed, self.logits, num_rows)
            if spec.logit_scale != 1.0 or spec.logit_cap:
                scale_cap(self.logits[:num_rows], spec.logit_scale, spec.logit_cap, pdl=True)

    def _norm(
        self,
        residual: ResidualStream,
        norm: NormWeights | None,
        linear: CudaSublayer,
        num_tokens: int,
        *,
        sums: bool = False,
    ) -> Input:
        """The norm of the stream as input of a linear layer: computed or quantised on the way if
        that saves a kernel, as is the stream itself if the layer `sums`, or the entire buffer
        `normed`."""
        summed = residual.summed(norm, num_tokens) if sums else None
        if summed is not None:
            return summed
        if linear.norms(num_tokens):
            normed = residual.normed(norm, num_tokens)
            if normed is not None:
                return normed
        rows = linear.input_rows(num_tokens) if residual.quantizes else None
        out = self._buffers.normed
        residual.norm(norm, out[:num_tokens] if rows is None else rows)
        return out if rows is None else rows

    def _norm_whole_rows(
        self, own: LayerWeights[CudaWeight, CudaExperts], attention: AttentionSpec, qkv: Tensor
    ) -> None:
        """The norm of all heads of q, and of k, at once, in place; the RoPE kernels have none."""
        if attention.qk_norm == "full" and own.q_norm is not None and own.k_norm is not None:
            eps, first_k = self.spec.norm_eps, attention.q_width
            norm_columns(qkv, 0, own.q_norm.weight, eps, pdl=True)
            norm_columns(qkv, first_k, own.k_norm.weight, eps, pdl=True)

    def _end_block(
        self,
        index: int,
        attended: Operand,
        x: Input,
        residual: ResidualStream,
        num_tokens: int,
    ) -> None:
        """The rest of a layer after attention; `attended` and x are entire buffers, or quantised, x
        the norm that attention and MLP share if they run in parallel."""
        own, layer, mixture = self.weights.layers[index], self.spec.layers[index], self._moes[index]
        scale = layer.residual_scale
        residual.add(attended, own.out, num_tokens, own.attention_post_norm, scale)
        if mixture is not None:
            sums = mixture.sums(num_tokens)
            x = self._norm(residual, own.mlp_norm, mixture, num_tokens, sums=sums)
            residual.add_mixture(x, mixture, num_tokens, own.mlp_post_norm, scale)
            return
        mlp, weights = layer.dense_mlp, own.dense_mlp
        if layer.parallel:
            gated = self._activate(weights, mlp, x, num_tokens)
            residual.add_parallel(gated, weights.down, num_tokens)
            return
        x = self._norm(residual, own.mlp_norm, weights.gate_up, num_tokens)
        gated = self._activate(weights, mlp, x, num_tokens)
        residual.add(gated, weights.down, num_tokens, own.mlp_post_norm, scale)

    def _activate(
        self, weights: MlpWeights[CudaWeight], mlp: MlpSpec, x: Input, num_tokens: int
    ) -> Operand:
        """The first linear layer of an MLP and its activation: x, an entire buffer -> what the
        second one takes."""
        gate_up, gated = self._buffers.mlp[mlp]
        if mlp.gated and mlp.activation == "silu":
            return weights.gate_up.gated(x, gate_up, gated, num_tokens, weights.down)
        weights.gate_up.product(x, gate_up, num_tokens)
        activate = _ACTIVATIONS[mlp.activation, mlp.gated]
        activate(gate_up[:num_tokens], out=gated[:num_tokens], pdl=True)
        return gated

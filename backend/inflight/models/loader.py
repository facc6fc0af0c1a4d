"""Loads a checkpoint's tensors as a model's weights, on its device and in its layout.

The result is the same for every format: q | k | v and gate | up fused, the columns of heads in the
order of `rope_order`, norms' weights in float32 and ready to multiply with, all others in the dtype
of the activations, or in 8 bits with a scale for each row. With latent attention, what q, k and v
are made of is fused: queries, or the vector that they are products of, and the latent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.models.family import WHOLE_TENSORS
from inflight.models.layers.key_balance import balanced
from inflight.models.layers.linear import CpuEmbedding, CpuWeight
from inflight.models.layers.norm import NormWeights
from inflight.models.layers.rope import rope_order
from inflight.models.layers.weights import (
    CpuExperts,
    E,
    L,
    LatentWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    X,
)
from inflight.models.linear.grouped_cpu import (
    CpuGroupedLinear,
    CpuGroupedTable,
    PackedPart,
    is_supported,
)
from inflight.models.linear.quantized import CpuQuantizedLinear
from inflight.models.linear.unquantized import CpuLinear, CpuTable
from inflight.models.quantization.choice import CpuFormat
from inflight.models.quantization.grouped import GroupedMatrix, joined_kinds
from inflight.models.quantization.matrix import (
    Matrix,
    QuantizedMatrix,
    column_parts,
    dequantized,
    in_one_format,
    rounded,
    row_parts,
    stored_kind,
)
from inflight.models.registry import family_of
from inflight.models.spec import AttentionSpec, LatentSpec, MlpSpec, ModelSpec, MoeSpec
from inflight.models.stored.weights import Shape, Weights, open_weights
from inflight_kernels.torch_ops.transformer import pack

Progress = Callable[[str, float], None]

M = TypeVar("M", Tensor, Matrix)

_AS_STORED = CpuFormat()


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """Stored weights of one expert.

    Attributes:
        gate_up: gate and up, or up alone if there is no gate.
        down: the other one.
        gate_up_biases, down_biases: of these layers; empty without biases.
    """

    gate_up: Sequence[Matrix]
    down: Sequence[Matrix]
    gate_up_biases: Sequence[Tensor]
    down_biases: Sequence[Tensor]

    def split(self, count: int) -> Iterator[ExpertParts]:
        """So many equally wide experts, without biases, whose outputs add up to this one's."""
        rows = [self.gate_up[0].shape[0] // count] * count
        first = zip(*(row_parts(part, rows) for part in self.gate_up), strict=True)
        last = zip(*(column_parts(part, count) for part in self.down), strict=True)
        return (ExpertParts(*parts, [], []) for parts in zip(first, last, strict=True))

    def is_stored_as(self, other: ExpertParts) -> bool:
        """Whether both have the same format."""
        own, others = (
            [stored_kind(part) for part in layer]
            for layer in ((*self.gate_up, *self.down), (*other.gate_up, *other.down))
        )
        return own == others


class WeightPlacement(Protocol[L, X, E]):
    """Where weights are kept, and in which layout. Results do not alias the file."""

    def table(self, stored: Tensor) -> Tensor:
        """An embedding table, or other weights, in the dtype of activations; layout unchanged."""

    def norm(self, stored: Tensor, offset: float = 0.0) -> Tensor:
        """The weight of a norm, or another vector, plus an offset, in float32."""

    def linear(self, weights: Sequence[Matrix], biases: Sequence[Tensor]) -> L:
        """Several linear layers fused into one, concatenated along rows; biases may be absent.

        Parts may be quantised, and differ in that: `matrix.in_one_format`. If they are quantised
        to INT8 here, and so are their inputs, both are spread.
        """

    def experts(self, count: int, parts: Iterator[ExpertParts]) -> X:
        """All experts of a layer, so many, each of which is read when it is asked for."""

    def shared_experts(self, moe: MoeSpec) -> int:
        """As how many further experts the shared one is kept, if it is stored as the others are; 0
        for layers of its own."""

    def router(self, stored: Tensor) -> Tensor:
        """A weight that scores experts, in float32: never quantised."""

    def embedding(self, stored: Matrix) -> E:
        """An embedding table, never quantised here: as it is stored, or dequantised."""

    def tied(self, embedding: E) -> L:
        """The output layer with a placed embedding as its weight."""

    def head(self, stored: Matrix) -> L:
        """An output layer, never quantised here: as it is stored, or dequantised."""


class CpuPlacement:
    """In host memory.

    Args:
        dtype: of weights that are not quantised, and of activations.
        linear: how linear layers run. Groups for which there are no kernels are dequantised; those
            of an embedding and an output layer stay if those of linear layers do.
    """

    def __init__(self, dtype: torch.dtype, linear: CpuFormat = _AS_STORED) -> None:
        self._dtype = dtype
        self._linear = linear

    def table(self, stored: Tensor) -> Tensor:
        # A copy even if the dtype is the same: the weights must not depend on the mapped file.
        return stored.to(self._dtype, copy=True)

    def norm(self, stored: Tensor, offset: float = 0.0) -> Tensor:
        # In place: a sum on the meta device would import torch's compiler, which takes seconds.
        return stored.to(torch.float32, copy=True).add_(offset)

    def linear(self, weights: Sequence[Matrix], biases: Sequence[Tensor]) -> CpuWeight:
        return self._linear_of(weights, biases, spreads=True)

    def _linear_of(
        self, weights: Sequence[Matrix], biases: Sequence[Tensor], *, spreads: bool
    ) -> CpuWeight:
        bias = self._joined(biases) if biases else None
        if self._linear.quantization == "int4":
            weights = [rounded(part) for part in weights]
        grouped = self._kept(weights)
        if grouped:
            return CpuGroupedLinear([PackedPart(part) for part in joined_kinds(grouped)], bias)
        parts = in_one_format(weights, self._linear.quantization, spreads=spreads)
        if isinstance(parts, QuantizedMatrix):
            return CpuQuantizedLinear(parts, bias)
        return CpuLinear(self._joined(parts), bias)

    def experts(self, count: int, parts: Iterator[ExpertParts]) -> CpuExperts:
        # Not spread, as on GPUs, whose kernels of experts quantise inputs as they are.
        return [
            MlpWeights(
                self._linear_of(expert.gate_up, expert.gate_up_biases, spreads=False),
                self._linear_of(expert.down, expert.down_biases, spreads=False),
            )
            for expert in parts
        ]

    def shared_experts(self, moe: MoeSpec) -> int:
        return 0

    def router(self, stored: Tensor) -> Tensor:
        return pack(stored.to(torch.float32, copy=True))

    def embedding(self, stored: Matrix) -> CpuTable | CpuGroupedTable:
        grouped = self._kept([stored])
        if grouped:
            return CpuGroupedTable(PackedPart(*grouped), self._dtype)
        return CpuTable(self.table(dequantized(stored)))

    def tied(self, embedding: CpuEmbedding) -> CpuWeight:
        assert isinstance(embedding, CpuTable | CpuGroupedTable), "of this placement"
        return embedding.as_linear()

    def head(self, stored: Matrix) -> CpuWeight:
        return self.embedding(stored).as_linear()

    def _kept(self, weights: Sequence[Matrix]) -> list[GroupedMatrix]:
        """The parts of a layer if all of them stay in groups; otherwise none."""
        if not self._linear.keeps_groups:
            return []
        kept = [part for part in weights if isinstance(part, GroupedMatrix) and is_supported(part)]
        return kept if len(kept) == len(weights) else []

    def _joined(self, stored: Sequence[Tensor]) -> Tensor:
        return torch.cat([self.table(part) for part in stored])


def load_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    placement: WeightPlacement[L, X, E],
    progress: Progress,
    device: torch.device | str = "cpu",
    *,
    balances_keys: bool = False,
) -> ModelWeights[L, X, E]:
    """Read all weights of a model.

    Args:
        checkpoint: where they are.
        spec: of the model.
        placement: where they are put.
        progress: called with ("weights", fraction) as layers are loaded.
        device: of the placement, where weights are drawn if they are.
        balances_keys: whether keys are to be rounded to INT8; see `key_balance`.

    Raises:
        ConfigError: the weights are corrupt or do not match the spec.
    """
    stored = open_weights(checkpoint, spec, weight_shapes(spec), device)
    reader = _LayerReader(checkpoint, spec, stored, placement, balances_keys)

    layers: list[LayerWeights[L, X]] = []
    # Reading is bound by dequantisation in numpy, one core per tensor.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        table = pool.submit(
            lambda: placement.embedding(stored.read_matrix("model.embed_tokens.weight"))
        )
        for done in pool.map(reader.layer, range(spec.num_layers)):
            layers.append(done)
            progress("weights", len(layers) / (spec.num_layers + 1))
        embedding = table.result()
    if spec.tie_word_embeddings:
        head = placement.tied(embedding)
    else:
        head = placement.head(stored.read_matrix("lm_head.weight"))
    norm = reader.norm("model.norm", has_bias=spec.norm_bias)
    progress("weights", 1.0)
    return ModelWeights(embedding=embedding, layers=layers, norm=norm, head=head)


def weight_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Shapes of all tensors that a checkpoint of this model must have, by name."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if spec.norm_bias:
        shapes["model.norm.bias"] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for index in range(spec.num_layers):
        for slot, (shape, bias) in _slots(spec, index).items():
            name = _name(spec, index, slot)
            if slot in WHOLE_TENSORS:
                shapes[name] = shape
                continue
            first, *others = shape
            if f"{name}.weight" in shapes:  # fused with the slots before
                first += shapes[f"{name}.weight"][0]
            shapes[f"{name}.weight"] = (first, *others)
            if bias:
                shapes[f"{name}.bias"] = (first,)
    return shapes


def linear_names(spec: ModelSpec) -> set[str]:
    """Names of the weights of all linear layers but the output layer, as a folder stores them."""
    return {
        f"{_name(spec, index, slot)}.weight"
        for index in range(spec.num_layers)
        for slot in _slots(spec, index)
        if slot.partition(".")[0] in _LINEAR
    }


def linear_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Shapes of the weights of `linear_names`."""
    shapes = weight_shapes(spec)
    return {name: shapes[name] for name in linear_names(spec)}


_QKV = ("q", "q_a", "kv_a", "k", "v")
"""Slots that are fused, as far as a layer has them."""

_LINEAR = frozenset(
    {*_QKV, "q_b", "out"}
    | {
        f"{prefix}{part}"
        for prefix in ("", "expert_", "shared_")
        for part in ("gate", "up", "down")
    }
)
"""Slots of linear layers that may be quantised. Those of expert N end with .N."""


def _slots(spec: ModelSpec, index: int) -> dict[str, tuple[Shape, bool]]:
    """The tensors of a layer: shape, and whether it has a bias."""
    layer, hidden = spec.layers[index], spec.hidden_size
    attention = layer.attention
    norm = ((hidden,), spec.norm_bias)
    slots: dict[str, tuple[Shape, bool]] = {
        **_slots_of_qkv(attention, hidden),
        "out": ((hidden, attention.out_width), attention.out_bias),
        **({"sinks": ((attention.num_heads,), False)} if attention.sinks else {}),
        **_slots_of_mlp(layer.mlp, hidden),
    }
    if layer.pre_norms:
        slots["attention_norm"] = norm
        if not layer.parallel:
            slots["mlp_norm"] = norm
    if layer.post_norms:
        slots |= dict.fromkeys(("attention_post_norm", "mlp_post_norm"), norm)
    if attention.qk_norm:
        slots["q_norm"] = (attention.qk_norm_shape(attention.num_heads), False)
        slots["k_norm"] = (attention.qk_norm_shape(attention.num_kv_heads), False)
    return slots


def _slots_of_qkv(attention: AttentionSpec, hidden: int) -> dict[str, tuple[Shape, bool]]:
    latent, num_heads = attention.latent, attention.num_heads
    if latent is None:
        rows = {"q": attention.q_width, "k": attention.kv_width, "v": attention.kv_width}
        return {slot: ((count, hidden), attention.qkv_bias) for slot, count in rows.items()}
    q_rows, rank = num_heads * latent.qk_dim, latent.rank
    shapes: dict[str, Shape] = {
        "kv_a": (latent.key_dim, hidden),
        "kv_a_norm": (rank,),
        "kv_b": (num_heads * (latent.nope_dim + latent.v_dim), rank),
    }
    if latent.q_rank:
        shapes |= {
            "q_a": (latent.q_rank, hidden),
            "q_a_norm": (latent.q_rank,),
            "q_b": (q_rows, latent.q_rank),
        }
    else:
        shapes["q"] = (q_rows, hidden)
    return {slot: (shape, False) for slot, shape in shapes.items()}


def _slots_of_mlp(mlp: MlpSpec | MoeSpec, hidden: int) -> dict[str, tuple[Shape, bool]]:
    if isinstance(mlp, MlpSpec):
        up = ((mlp.width, hidden), mlp.bias)
        # Gate before up, as in fused tensors.
        return {
            **({"gate": up} if mlp.gated else {}),
            "up": up,
            "down": ((hidden, mlp.width), mlp.bias),
        }
    slots: dict[str, tuple[Shape, bool]] = {"router": ((mlp.num_experts, hidden), mlp.router_bias)}
    if mlp.select_bias:
        slots["select_bias"] = ((mlp.num_experts,), False)
    expert = _slots_of_mlp(mlp.expert, hidden)
    for index in range(mlp.num_experts):
        slots |= {f"expert_{slot}.{index}": shape for slot, shape in expert.items()}
    if mlp.shared is not None:
        shared = _slots_of_mlp(mlp.shared, hidden)
        slots |= {f"shared_{slot}": shape for slot, shape in shared.items()}
    if mlp.shared_gate:
        slots["shared_score"] = ((1, hidden), False)
    return slots


def _name(spec: ModelSpec, index: int, slot: str) -> str:
    """Of a slot's tensors, without suffix unless it is one of WHOLE_TENSORS."""
    slot, _, expert = slot.partition(".")
    return f"model.layers.{index}.{family_of(spec).tensors[slot][0].format(expert)}"


class _LayerReader(Generic[L, X, E]):
    """Reads the layers of a checkpoint, from several threads.

    Args:
        checkpoint: where they are.
        spec: of the model.
        stored: its tensors.
        placement: where they are put.
        balances_keys: whether norms of q and k are balanced.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        stored: Weights,
        placement: WeightPlacement[L, X, E],
        balances_keys: bool,
    ) -> None:
        self._spec = spec
        self._stored = stored
        self._placement = placement
        self._balances_keys = balances_keys
        family = family_of(spec)
        is_stored = not checkpoint.random_weights
        centered = is_stored and checkpoint.format in family.zero_centered_norms
        self._norm_offset = 1.0 if centered else 0.0
        self._adjacent = is_stored and checkpoint.format in family.rope_pairs

    def layer(self, index: int) -> LayerWeights[L, X]:
        slots = _slots(self._spec, index)

        def norm(slot: str) -> NormWeights | None:
            if slot not in slots:
                return None
            name, (_, has_bias) = _name(self._spec, index, slot), slots[slot]
            return self.norm(name, has_bias, self._order(index, slot))

        def linear(*names: str) -> L:
            return self._placement.linear(*self._fused(index, slots, names))

        layer = self._spec.layers[index]
        spec, latent = layer.mlp, layer.attention.latent
        q_norm, k_norm = norm("q_norm"), norm("k_norm")
        if self._balances_keys and q_norm is not None and k_norm is not None:
            q_norm, k_norm = balanced(q_norm, k_norm, layer.attention.head_dim)
        return LayerWeights(
            attention_norm=norm("attention_norm"),
            qkv=linear(*_QKV),
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=self._vector(index, "sinks") if "sinks" in slots else None,
            latent=None if latent is None else self._latent(index, slots, latent),
            out=linear("out"),
            attention_post_norm=norm("attention_post_norm"),
            mlp_norm=norm("mlp_norm"),
            mlp=self._moe(index, slots, spec)
            if isinstance(spec, MoeSpec)
            else MlpWeights(linear("gate", "up"), linear("down")),
            mlp_post_norm=norm("mlp_post_norm"),
        )

    def _latent(
        self, index: int, slots: Mapping[str, tuple[Shape, bool]], spec: LatentSpec
    ) -> LatentWeights[L]:
        # Both parts of each head, one below the other.
        up = self._stored.read(f"{_name(self._spec, index, 'kv_b')}.weight")
        heads = up.view(-1, spec.nope_dim + spec.v_dim, spec.rank)
        k_up, v_up = torch.split(heads, [spec.nope_dim, spec.v_dim], 1)
        q_norm, q_b = None, None
        if "q_b" in slots:
            q_norm = self.norm(_name(self._spec, index, "q_a_norm"), has_bias=False)
            q_b = self._placement.linear(*self._fused(index, slots, ["q_b"]))
        return LatentWeights(
            q_norm=q_norm,
            q_b=q_b,
            kv_norm=self.norm(_name(self._spec, index, "kv_a_norm"), has_bias=False),
            k_up=self._placement.table(k_up.contiguous()),
            v_up=self._placement.table(v_up.contiguous()),
        )

    def _moe(
        self, index: int, slots: Mapping[str, tuple[Shape, bool]], spec: MoeSpec
    ) -> MoeWeights[L, X]:
        def router(slot: str) -> Tensor:
            name = _name(self._spec, index, slot)
            return self._placement.router(self._stored.read(f"{name}.weight"))

        def expert(number: int) -> ExpertParts:
            gate, up, down = (f"expert_{part}.{number}" for part in ("gate", "up", "down"))
            first, first_biases = self._fused(index, slots, (gate, up))
            last, last_biases = self._fused(index, slots, (down,))
            return ExpertParts(first, last, first_biases, last_biases)

        def shared_layers(parts: ExpertParts) -> MlpWeights[L]:
            return MlpWeights(
                self._placement.linear(parts.gate_up, parts.gate_up_biases),
                self._placement.linear(parts.down, parts.down_biases),
            )

        parts: Iterator[ExpertParts] = map(expert, range(spec.num_experts))
        shared, joined = self._shared(index, slots, spec), 0
        if shared is not None and shared.is_stored_as(expert(0)):
            joined = self._placement.shared_experts(spec)
            parts = chain(parts, shared.split(joined)) if joined else parts
        return MoeWeights(
            router=router("router"),
            router_bias=self._vector(index, "router", ".bias") if spec.router_bias else None,
            select_bias=self._vector(index, "select_bias") if spec.select_bias else None,
            experts=self._placement.experts(spec.num_experts + joined, parts),
            shared=None if shared is None or joined else shared_layers(shared),
            shared_gate=router("shared_score") if spec.shared_gate else None,
        )

    def _shared(
        self, index: int, slots: Mapping[str, tuple[Shape, bool]], spec: MoeSpec
    ) -> ExpertParts | None:
        """The expert of all tokens."""
        if spec.shared is None:
            return None
        first, first_biases = self._fused(index, slots, ("shared_gate", "shared_up"))
        last, last_biases = self._fused(index, slots, ("shared_down",))
        return ExpertParts(first, last, first_biases, last_biases)

    def _vector(self, index: int, slot: str, suffix: str = "") -> Tensor:
        """A tensor in float32."""
        name = _name(self._spec, index, slot)
        return self._placement.norm(self._stored.read(f"{name}{suffix}"))

    def _fused(
        self, index: int, slots: Mapping[str, tuple[Shape, bool]], names: Sequence[str]
    ) -> tuple[list[Matrix], list[Tensor]]:
        """Weights and biases of the linear layers that a fused one consists of."""
        present = [name for name in names if name in slots]
        biases = [name for name in present if slots[name][1]]
        return (
            self._parts(index, slots, present, "weight", self._stored.read_matrix),
            self._parts(index, slots, biases, "bias", self._stored.read),
        )

    def norm(self, name: str, has_bias: bool, order: Tensor | None = None) -> NormWeights:
        """Read a norm: its tensors' name without suffix, and the order of its columns."""
        weight = self._stored.read(f"{name}.weight")
        weight = _in_order(weight.flatten(), order).view(weight.shape)
        bias = self._stored.read(f"{name}.bias") if has_bias else None
        return NormWeights(
            self._placement.norm(weight, self._norm_offset),
            None if bias is None else self._placement.norm(bias),
        )

    def _parts(
        self,
        index: int,
        slots: Mapping[str, tuple[Shape, bool]],
        names: Sequence[str],
        kind: str,
        read: Callable[[str], M],
    ) -> list[M]:
        """The tensors of slots, of which neighbours may be stored as one."""
        parts: list[M] = []
        for name, fused in groupby(names, lambda slot: _name(self._spec, index, slot)):
            members = list(fused)
            rows = [slots[slot][0][0] for slot in members]
            for slot, part in zip(members, row_parts(read(f"{name}.{kind}"), rows), strict=True):
                parts.append(_in_order(part, self._order(index, slot)))
        return parts

    def _order(self, index: int, slot: str) -> Tensor | None:
        """The order [D] of the columns of each head in a slot; None for that of the file."""
        if slot not in ("q", "q_b", "kv_a", "k", "q_norm", "k_norm"):
            return None
        attention = self._spec.layers[index].attention
        latent = attention.latent
        columns = rope_order(attention.rope, attention.rope_dim, self._adjacent)
        if columns is None:
            return None
        # With latent attention RoPE rotates the columns behind these.
        first = 0 if latent is None else latent.rank if slot == "kv_a" else latent.nope_dim
        return torch.tensor([*range(first), *(first + column for column in columns)])


def _in_order(stored: M, order: Tensor | None) -> M:
    """Rows [heads * D, ...] with those of each head in this order [D]."""
    if order is None:
        return stored
    if isinstance(stored, GroupedMatrix):
        if stored.codes.is_meta:
            return stored
        return stored.rows(_in_order(torch.arange(stored.shape[0]), order))
    if isinstance(stored, QuantizedMatrix):
        values, scales = _in_order(stored.values, order), _in_order(stored.scales, order)
        return replace(stored, values=values, scales=scales)
    if stored.is_meta:
        return stored
    heads = stored.reshape(-1, len(order), *stored.shape[1:])
    return heads.index_select(1, order.to(stored.device)).view(stored.shape)

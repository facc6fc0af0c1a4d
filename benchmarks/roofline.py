"""The rates that a GPU's memory and tensor cores allow a row of `inflight bench engine`.

A step multiplies all its tokens by the layers' weights, and those whose logits are needed by the
head; in attention, each token reads the keys and values of its context. Either part takes the
longer of its bytes at the speed of a copy and its FLOPs at the speed of a large GEMM, and one
follows the other. All prompts come first, in steps of `batched_tokens`; each further step decodes
one token of every sequence. Everything else (norms, sampling, gaps between kernels) takes no time.

Latent attention reads one key per token, whose first columns are its value. Queries that decode
attend to it with as many columns; prompts attend to the narrower keys and values of all heads.
Either way a token is multiplied by the matrices of latents once.

Of a mixture of experts, a step reads those that some token has: of E experts with k per token,
E * (1 - (1 - k / E) ** T) for T tokens that are spread evenly. Each token is multiplied by its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.cli.bench.engine import MAX_NUM_BATCHED_TOKENS
from inflight.cli.bench.rows import Row
from inflight.models.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a GPU reaches on large operands.

    Attributes:
        bytes_per_s: of a pass over memory, read and written bytes together.
        flops_per_s: of a large square GEMM.
    """

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The roofline of one model on one GPU.

    Attributes:
        item_bytes: of an element of weights, keys and values.
        batched_tokens: of a step, at most.
        linear_flops_per_s: of a large GEMM in the format of the layers' weights; None for that of
            the ceilings.
        linear_bytes, kv_bytes: of an element of the layers' weights, and of keys and values without
            their scales; None for item_bytes.
    """

    spec: ModelSpec
    ceilings: Ceilings
    item_bytes: int = 2
    batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    linear_flops_per_s: float | None = None
    linear_bytes: int | None = None
    kv_bytes: int | None = None

    def rate(self, row: Row) -> float:
        """In the row's metric: tokens per second of the output, or of the prompts."""
        length = row.input_len if row.metric == "prompt_tok_s" else row.output_len
        return row.num_requests * length / self.seconds(row)

    def seconds(self, row: Row) -> float:
        """From the first prompt to the last token."""
        num_prompt_tokens = row.num_requests * row.input_len
        num_prompt_steps = -(-num_prompt_tokens // self.batched_tokens)
        prompts = self._products(num_prompt_steps, num_prompt_tokens, row.num_requests)
        num_steps = row.output_len - 1  # the last prompt step chooses the first token
        num_tokens = num_steps * row.num_requests
        decode = self._products(num_steps, num_tokens, num_tokens)
        return prompts + decode + self._prompt_attention(row) + self._decode_attention(row)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a large step reads: of the embedding it needs a few rows only."""
        return self._weight_bytes(self.batched_tokens)

    def _weight_bytes(self, num_tokens: float) -> int:
        """Of a step of so many tokens."""
        linear_bytes = self.linear_bytes or self.item_bytes
        elements = round(sum(self._elements(layer, num_tokens) for layer in self.spec.layers))
        others = self._head_elements + self.spec.up_elements
        return (elements - self.spec.up_elements) * linear_bytes + others * self.item_bytes

    def _elements(self, layer: LayerSpec, num_tokens: float) -> float:
        """Of a layer's weight matrices that so many tokens are multiplied by, between them."""
        hidden, mlp = self.spec.hidden_size, layer.mlp
        total = float(layer.attention.matrix_elements(hidden) + mlp.matrix_elements(hidden))
        if isinstance(mlp, MoeSpec):
            left = mlp.num_experts * (1 - mlp.top_k / mlp.num_experts) ** num_tokens
            total -= left * mlp.expert.matrix_elements(hidden)
        return total

    @property
    def _head_elements(self) -> int:
        return self.spec.vocab_size * self.spec.hidden_size

    def _products(self, num_steps: int, num_tokens: int, num_logits: int) -> float:
        layers = num_tokens * sum(self._elements(layer, 1) for layer in self.spec.layers)
        if self.linear_flops_per_s is not None:  # as FLOPs of the ceilings that take as long
            layers *= self.ceilings.flops_per_s / self.linear_flops_per_s
        flops = 2 * (layers + self._head_elements * num_logits)
        if not num_steps:
            return 0.0
        num_bytes = num_steps * self._weight_bytes(num_tokens / num_steps)
        return self.ceilings.seconds(num_bytes, flops)

    def _prompt_attention(self, row: Row) -> float:
        """Keys and values are written once; that they are read in tiles is left out."""
        num_bytes = flops = 0
        for attention in self._attentions():
            num_keys = _num_keys(attention, 1, row.input_len)
            flops += _flops_per_key(attention, absorbed=False) * num_keys
            num_bytes += attention.kv_group.token_elements * row.input_len * self._kv_bytes
        return self.ceilings.seconds(row.num_requests * num_bytes, row.num_requests * flops)

    def _decode_attention(self, row: Row) -> float:
        num_bytes = flops = 0
        for attention in self._attentions():
            num_keys = _num_keys(attention, row.input_len + 1, row.input_len + row.output_len - 1)
            flops += _flops_per_key(attention, absorbed=True) * num_keys
            num_bytes += attention.kv_group.token_elements * num_keys * self._kv_bytes
        return self.ceilings.seconds(row.num_requests * num_bytes, row.num_requests * flops)

    @property
    def _kv_bytes(self) -> int:
        return self.kv_bytes or self.item_bytes

    def _attentions(self) -> list[AttentionSpec]:
        return [layer.attention for layer in self.spec.layers]


def _flops_per_key(attention: AttentionSpec, *, absorbed: bool) -> int:
    """Of a token's queries; absorbed ones have the width of the cached key."""
    latent, widths = attention.latent, 2 * attention.head_dim
    if latent is not None:
        absorbed_widths = latent.key_dim + latent.rank
        widths = absorbed_widths if absorbed else latent.qk_dim + latent.v_dim
    return 2 * attention.num_heads * widths


def _num_keys(attention: AttentionSpec, first: int, last: int) -> int:
    """Keys that the queries of a sequence attend to, from the `first` to the `last` token,
    counted from 1."""
    window = attention.window or last
    within = min(last, window)
    # Up to `within`, a query attends to all tokens so far; beyond it, to `window`.
    rising = range(first, within + 1)
    return sum(rising) + window * max(0, last - max(first - 1, within))

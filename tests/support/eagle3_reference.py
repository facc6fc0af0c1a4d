"""The published EAGLE-3 head, in plain torch without a cache (see `models.eagle3`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """One head.

    Attributes:
        weights: by the names of its authors.
        settings: of its config.json.
        embedding: [V, hidden_size], the target's if the head has none.
    """

    weights: dict[str, Tensor]
    settings: dict[str, Any]
    embedding: Tensor

    def __call__(self, hidden: Tensor, followers: Tensor) -> Tensor:
        """Hidden states [T, hidden_size] and the tokens after them [T] -> hidden states."""
        settings, w = self.settings, {f"{k}": v.double() for k, v in self.weights.items()}
        heads, groups = settings["num_attention_heads"], settings["num_key_value_heads"]
        dim, count = settings["head_dim"], len(hidden)
        embedded = self._norm(self.embedding.double()[followers], "midlayer.input_layernorm")
        normed = self._norm(hidden, "midlayer.hidden_norm")
        if settings.get("norm_before_residual"):
            hidden = normed
        both = torch.cat((embedded, normed), -1)
        q, k, v = (
            (both @ w[f"midlayer.self_attn.{name}_proj.weight"].t()).view(count, -1, dim)
            for name in "qkv"
        )
        positions = torch.arange(count).double()
        exponents = torch.arange(0, dim, 2).double() / dim
        angles = torch.outer(positions, settings["rope_theta"] ** -exponents)
        q, k = _rotate(q, angles), _rotate(k, angles)
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        scores += torch.full((count, count), float("-inf")).double().triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        hidden = hidden + attended @ w["midlayer.self_attn.o_proj.weight"].t()
        x = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (x @ w[f"midlayer.mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        x = torch.nn.functional.silu(gate) * up
        hidden = hidden + x @ w["midlayer.mlp.down_proj.weight"].t()
        return self._norm(hidden, "norm") if settings.get("norm_output") else hidden

    def fuse(self, features: Tensor) -> Tensor:
        if self.settings.get("norm_before_fc"):
            features = self._norm(features, "input_norm")
        if self.settings.get("fc_norm"):
            parts = features.split(self.settings["hidden_size"], -1)
            normed = [self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            features = torch.cat(normed, -1)
        return features.double() @ self.weights["fc.weight"].double().t()

    def scores(self, hidden: Tensor) -> Tensor:
        """Of the draft vocabulary: [T, draft_vocab_size]."""
        if not self.settings.get("norm_output"):
            hidden = self._norm(hidden, "norm")
        return hidden @ self.weights["lm_head.weight"].double().t()

    def drafts(self, features: Tensor, token_ids: list[int], count: int) -> list[int]:
        """Greedy ones after a text, of whose tokens all but the last have features."""
        hidden = self.fuse(features)
        tokens = list(token_ids)
        while len(tokens) < len(token_ids) + count:
            out = self(hidden, torch.tensor(tokens[1:]))
            best = int(self.scores(out[-1:]).argmax())
            tokens.append(best + int(self.weights["d2t"][best]))
            hidden = torch.cat((hidden, out[-1:]))
        return tokens[len(token_ids) :]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = x.double()
        mean = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean + self.settings["rms_norm_eps"])
        return x * self.weights[f"{name}.weight"].double()


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

"""Specification of an EAGLE-3 head, read from its config.json (see `eagle3`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inflight.checkpoint.checked_fields import CheckedFields, read_json
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.models.registry import all_families, spec_of
from inflight.models.settings import of_config
from inflight.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """The shape of an EAGLE-3 head (see `models.eagle3`).

    Attributes:
        layer: the head's layer, as a one-layer model: num_layers is 1, vocab_size the target's.
        draft_vocab_size: tokens that it can draft.
        target_hidden_size: hidden_size of the model that it was trained for.
        aux_layers: layers of the target whose input hidden states the head takes; num_layers
            denotes the last layer's output.
        norm_before_residual: whether the residual branch takes the hidden states after their norm
            instead of before it.
        feature_norms: names and widths of the norms of the target's hidden states, side by side,
            before they are fused: one over all of them, one for each of aux_layers, or none.
        norm_output: whether the next position takes the head's hidden state after its last norm.
    """

    layer: ModelSpec
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool = False
    feature_norms: tuple[tuple[str, int], ...] = ()
    norm_output: bool = False


def read_eagle3_spec(checkpoint: Checkpoint, target: ModelSpec) -> Eagle3Spec:
    """Read and validate the configuration of an EAGLE-3 head, in either public format.

    The format of the authors and of SGLang (python/sglang/srt/models/llama_eagle3.py) is a Llama
    config.json with draft_vocab_size; `eagle_config` may give the auxiliary layers by the index of
    the layer whose output is used, one less than aux_layers here. The format of vLLM's speculators
    (vllm/transformers_utils/configs/speculators/algos.py) has the Llama settings in
    `transformer_layer_config`, and indices as here. Either may have further norms: those of
    EAGLE-3.1 (arXiv:2605.09992), or one over all hidden states, as heads of gpt-oss have.

    Raises:
        ConfigError: unreadable, not an EAGLE-3 head, or for another model than the target.
    """
    if checkpoint.format != "huggingface":
        raise ConfigError(f"{checkpoint.path}: an EAGLE-3 head must be a folder with a config.json")
    path = checkpoint.path / "config.json"
    outer = read_json(path)
    nested = outer.get("transformer_layer_config")
    raw = CheckedFields(nested, f"{path}: transformer_layer_config") if nested else outer
    _check_kind(outer, raw)
    llama = all_families()["llama"]
    model = spec_of(llama, of_config(raw, llama))
    for field in ("attention_bias", "mlp_bias"):
        if raw.flag(field):
            raise raw.error(f"{field}: true is not supported; allowed: false")
    layer = replace(model, layers=model.layers[:1])
    aux_layers = _aux_layers(outer, target.num_layers)
    if layer.vocab_size != target.vocab_size:
        raise raw.error(
            f"vocab_size: {layer.vocab_size}; it must equal that of the model, {target.vocab_size}"
        )
    target_hidden_size = outer.count("target_hidden_size", layer.hidden_size)
    if target_hidden_size != target.hidden_size:
        raise outer.error(
            f"the head was trained for hidden_size {target_hidden_size}; the model has "
            f"{target.hidden_size}"
        )
    draft_vocab_size = outer.count("draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise outer.error(
            f"draft_vocab_size: {draft_vocab_size}; allowed: up to vocab_size ({layer.vocab_size})"
        )
    return Eagle3Spec(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        aux_layers=aux_layers,
        norm_before_residual=outer.flag("norm_before_residual", nested is not None),
        feature_norms=_feature_norms(outer, len(aux_layers), target_hidden_size),
        norm_output=_norm_flag(outer, "norm_output"),
    )


def _check_kind(outer: CheckedFields, raw: CheckedFields) -> None:
    """Check that it is an EAGLE-3 head of the Llama architecture, and not quantised."""
    names = outer.get("architectures") or []
    kind = outer.get("speculators_model_type", "eagle3")
    if kind != "eagle3" or (names and not any("eagle3" in str(name).lower() for name in names)):
        raise outer.error(
            f"{names or kind} is not an EAGLE-3 head; allowed: LlamaForCausalLMEagle3"
        )
    for fields in (outer, raw):
        if fields.get("quantization_config"):
            raise fields.error(
                "quantization_config: quantised EAGLE-3 heads are not supported; use the "
                "unquantised head"
            )
    # Configs of SpecForge for gpt-oss have its model_type, with a layer of Llama or, under another
    # name of the architecture, of gpt-oss.
    kinds = {"llama", "gpt_oss"} if any("Llama" in str(name) for name in names) else {"llama"}
    if raw.get("model_type", "llama") not in kinds:
        raise raw.error(
            f"the architecture {raw.get('model_type')!r} is not supported; allowed: llama"
        )


def _norm_flag(outer: CheckedFields, key: str) -> bool:
    """Whether a head has a norm beyond those of all; some have the key in `eagle_config`."""
    inner = outer.get("eagle_config") or {}
    return outer.flag(key, bool(inner.get(key, False)))


def _feature_norms(outer: CheckedFields, count: int, width: int) -> tuple[tuple[str, int], ...]:
    """See `Eagle3Spec`, for so many auxiliary layers of so many columns."""
    one, each = (_norm_flag(outer, key) for key in ("norm_before_fc", "fc_norm"))
    if one and each:
        raise outer.error("norm_before_fc and fc_norm: both are true; allowed: one of them")
    if one:
        return (("input_norm", count * width),)
    return tuple((f"fc_norm.{index}", width) for index in range(count)) if each else ()


def _aux_layers(raw: CheckedFields, num_layers: int) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    aux_layers = raw.get(key)
    if aux_layers is None:
        inner = raw.get("eagle_config") or {}
        if not inner.get("use_aux_hidden_state", True):
            raise raw.error("eagle_config: use_aux_hidden_state: false is not supported")
        ids = inner.get(key)
        # The authors' default, documented only by their code.
        aux_layers = [2, num_layers // 2, num_layers - 3]
        if ids:
            # No layer has the index num_layers: then they are as here, as those of
            # nvidia/gpt-oss-120b-Eagle3-v3.
            aux_layers = ids if num_layers in ids else [i + 1 for i in ids]
    whole = isinstance(aux_layers, list) and all(isinstance(tap, int) for tap in aux_layers)
    if not whole or not aux_layers or not all(0 <= tap <= num_layers for tap in aux_layers):
        raise raw.error(
            f"{key}: {aux_layers} are not layers of the model; allowed: 0 to {num_layers}"
        )
    return tuple(aux_layers)

"""The model families, and selection of the family of a checkpoint."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from inflight.checkpoint.checked_fields import read_json
from inflight.checkpoint.gguf import GgufFile
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.models import families, settings
from inflight.models.family import Family, Settings
from inflight.models.quantization.recognition import read_format
from inflight.models.refusals.architectures import refuse_folder, refuse_gguf
from inflight.models.refusals.config_keys import check_keys
from inflight.models.spec import AttentionSpec, ModelSpec


@cache
def all_families() -> dict[str, Family]:
    """The families by name, one per module of `families`."""
    modules = pkgutil.iter_modules(families.__path__, f"{families.__name__}.")
    found = [importlib.import_module(module.name).FAMILY for module in modules]
    return {family.name: family for family in found}


def family_of(spec: ModelSpec) -> Family:
    return all_families()[spec.family]


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Read and validate the configuration of a checkpoint's model, without its weights.

    Raises:
        ConfigError: unreadable, inconsistent or not supported.
    """
    if checkpoint.format == "gguf":
        file = GgufFile(checkpoint.path)
        name = _gguf_architecture(file)
        architectures = {a: f for f in _families() for a in f.gguf_architectures}
        refuse_gguf(file, name, architectures)
        family = _find(name, architectures, file.path)
        found = settings.of_gguf(file, family)
    else:
        fields = read_json(checkpoint.path / "config.json")
        model_types = {t: f for f in _families() for t in f.model_types}
        refuse_folder(fields, model_types)
        read_format(fields, checkpoint.path)  # refuses those that are not supported
        family = _find(fields.text("model_type"), model_types, fields.where)
        found = settings.of_folder(checkpoint.path, family)
    spec = spec_of(family, found)
    check_keys(found.fields, family)
    return spec


def spec_of(family: Family, found: Settings) -> ModelSpec:
    """The model that the settings of a family's checkpoint describe.

    Raises:
        ConfigError: the settings are inconsistent or not supported.
    """
    spec = found.model(family, tuple(family.layers(found)))
    for attention in spec.attentions:
        if attention.num_heads % attention.num_kv_heads:
            raise found.fields.error(
                f"{attention.num_heads} attention heads cannot share {attention.num_kv_heads} "
                "key-value heads evenly"
            )
        _check_rope(attention, found)
    # A special token id outside the vocabulary is harmless: it can never be sampled.
    return spec


def _check_rope(attention: AttentionSpec, found: Settings) -> None:
    rope, head_dim = attention.rope, attention.rope_dim
    if head_dim % 2:
        raise found.fields.error(f"head_dim: {head_dim} is odd; RoPE needs an even one")
    rotated = rope.rotary_dim or head_dim
    if rotated % 2 or rotated > head_dim:
        raise found.fields.error(
            f"RoPE rotates {rotated} of {head_dim} columns of a head; allowed: an even number of "
            f"at most {head_dim}"
        )
    for divisors in (rope.divisors, rope.long_divisors):
        if divisors is not None and len(divisors) != rotated // 2:
            raise found.fields.error(
                f"RoPE has {len(divisors)} scaling factors for {rotated // 2} frequencies"
            )


def _gguf_architecture(file: GgufFile) -> str:
    """`general.architecture`; llama.cpp gives Mixtral that of Llama, and DeepSeek V3 that of V2."""
    name = str(file.metadata.get("general.architecture"))
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return "mixtral"
    # Only V3 chooses experts with sigmoids: older files of V2 do not say how.
    is_v3 = file.metadata.get("deepseek2.expert_gating_func") == _SIGMOID
    return "deepseek3" if name == "deepseek2" and is_v3 else name


_SIGMOID = 2  # of llama.cpp's gating functions


def _families() -> list[Family]:
    return list(all_families().values())


def _find(name: object, families: dict[str, Family], where: object) -> Family:
    found = families.get(str(name))
    if found is None:
        raise ConfigError(
            f"{where}: the architecture {name!r} is not supported; allowed: {', '.join(families)}"
        )
    return found

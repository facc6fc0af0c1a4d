"""What a drafter is made of: found and checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.errors import ConfigError
from inflight.models.eagle3_spec import Eagle3Spec, read_eagle3_spec
from inflight.models.registry import read_spec
from inflight.models.spec import ModelSpec
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter that settings ask for.

    Attributes:
        settings: what they say.
        checkpoint: where its weights are, if it has any of its own.
        model: the shape of what keeps keys and values of its own: a smaller model, or a head's one
            layer; None where the drafter has none.
        head: of eagle3.
    """

    settings: SpeculativeConfig
    checkpoint: Checkpoint | None = None
    model: ModelSpec | None = None
    head: Eagle3Spec | None = None

    @property
    def needs_history(self) -> bool:
        """Whether it reads the tokens of its sequences."""
        return self.settings.method in ("ngram", "eagle3")

    def scratch_bytes(self, config: EngineConfig, model: ModelSpec) -> int:
        """Memory on a GPU for drafts whose blocks their sequences do not have yet: one block each.

        They are in the cache that the drafter writes to, after its other blocks.
        """
        if self.settings.method == "ngram":
            return 0
        return config.max_num_seqs * _block_bytes(self.model or model, config)

    def block_bytes(self, config: EngineConfig) -> int:
        """Memory of its own for each KV block of the model."""
        return 0 if self.model is None else _block_bytes(self.model, config)


def _block_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    return spec.kv_layout(config.dtype).block_bytes(config.block_size)


def find_drafter(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelSpec
) -> DrafterSpec | None:
    """The drafter that settings ask for; None if they ask for none.

    Args:
        config: the engine's settings.
        checkpoint: of the model that is drafted for.
        model: its shape.

    Raises:
        ConfigError: it is not there, damaged, or for another model.
    """
    settings = config.speculative_config
    if settings is None:
        return None
    if settings.num_layers is not None and settings.num_layers > model.num_layers:
        raise ConfigError(
            f"speculative_config.num_layers: {settings.num_layers} is out of range; allowed: 1 to "
            f"{model.num_layers}, the layers that the model has"
        )
    if settings.model is None:
        return DrafterSpec(settings)
    try:
        own = dataclasses.replace(locate(settings.model), random_weights=config.random_weights)
        if settings.method == "eagle3":
            head = read_eagle3_spec(own, model)
            return DrafterSpec(settings, own, head.layer, head)
        smaller = read_spec(own)
        if smaller.vocab_size != model.vocab_size:
            raise ConfigError(
                f"{own.path} has a vocabulary of {smaller.vocab_size} tokens; the model's has "
                f"{model.vocab_size}, and a draft model must have the same"
            )
        _check_tokenizers(checkpoint, own)
    except ConfigError as error:
        raise ConfigError(
            f"speculative_config.model: {str(error).removeprefix('model: ')}"
        ) from None
    return DrafterSpec(settings, own, smaller)


def _check_tokenizers(checkpoint: Checkpoint, own: Checkpoint) -> None:
    """Equal ids must be equal texts, but for special tokens, which models rename."""
    ours, theirs = Tokenizer.load_if_present(checkpoint), Tokenizer.load_if_present(own)
    if ours is None or theirs is None:
        return
    special = set(ours.special_ids) | set(theirs.special_ids)
    texts = {id_: text for text, id_ in theirs.vocabulary().items() if id_ not in special}
    for text, id_ in ours.vocabulary().items():
        if id_ in texts and texts[id_] != text:
            raise ConfigError(
                f"{own.path} has another tokenizer: its token {id_} is {texts[id_]!r}, and the "
                f"model's is {text!r}"
            )

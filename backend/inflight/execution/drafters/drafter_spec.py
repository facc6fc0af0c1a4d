"""What a drafter is made of: found and checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.errors import ConfigError
from inflight.models.config import Eagle3Config, ModelConfig, read_config, read_eagle3_config
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
    model: ModelConfig | None = None
    head: Eagle3Config | None = None

    @property
    def needs_history(self) -> bool:
        """Whether it reads the tokens of its sequences."""
        return self.settings.method in ("ngram", "eagle3")

    def scratch_bytes(self, config: EngineConfig, model: ModelConfig) -> int:
        """Memory on a GPU for drafts whose blocks their sequences do not have yet: one block each.

        They are in the cache that the drafter writes to, after its other blocks.
        """
        if self.settings.method == "ngram":
            return 0
        return config.max_num_seqs * (self.model or model).kv_block_bytes(config)

    def block_bytes(self, config: EngineConfig) -> int:
        """Memory of its own for each KV block of the model."""
        return 0 if self.model is None else self.model.kv_block_bytes(config)


def find_drafter(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
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
            head = read_eagle3_config(own, model)
            return DrafterSpec(settings, own, head.layer, head)
        smaller = read_config(own)
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

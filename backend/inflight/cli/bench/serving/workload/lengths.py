"""How long prompts and outputs are: fixed, normal, as in published traces, or from a file."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inflight.errors import ConfigError, did_you_mean

# Draws until both lengths fit the context.
_MAX_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of one request, in tokens.

    Attributes:
        prompt: its text, if a file has it; `input_len` is then unknown and 0.
    """

    input_len: int
    output_len: int
    prompt: str = ""


class Distribution(Protocol):
    def draw(self, source: random.Random) -> int:
        """A number of tokens, at least 1."""
        ...

    def scaled(self, factor: float) -> Distribution: ...


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal with mean and standard deviation, at least 1; fixed if the latter is 0."""

    mean: float
    deviation: float = 0.0

    def draw(self, source: random.Random) -> int:
        return max(1, round(source.gauss(self.mean, self.deviation)))

    def scaled(self, factor: float) -> Normal:
        return Normal(max(1.0, self.mean * factor), self.deviation * factor)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """The logarithm is normal with mean `mu` and standard deviation `sigma`; redrawn above
    `high`."""

    mu: float
    sigma: float
    high: int

    def draw(self, source: random.Random) -> int:
        while True:
            value = math.exp(source.gauss(self.mu, self.sigma))
            if value <= self.high:
                return max(1, round(value))

    def scaled(self, factor: float) -> LogNormal:
        return LogNormal(self.mu + math.log(factor), self.sigma, max(1, round(self.high * factor)))


class Lengths(Protocol):
    def draw(self, source: random.Random, index: int) -> Shape:
        """Of request `index` of a level of load."""
        ...

    def scaled(self, factor: float) -> Lengths:
        """All lengths times a factor, at least 1; given prompts stay as they are."""
        ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """Both lengths are drawn independently."""

    inputs: Distribution
    outputs: Distribution

    def draw(self, source: random.Random, index: int) -> Shape:
        return Shape(self.inputs.draw(source), self.outputs.draw(source))

    def scaled(self, factor: float) -> Drawn:
        return Drawn(self.inputs.scaled(factor), self.outputs.scaled(factor))


@dataclass(frozen=True, slots=True)
class Listed:
    """In the order of a file, from its start again after its end."""

    shapes: tuple[Shape, ...]

    def draw(self, source: random.Random, index: int) -> Shape:
        return self.shapes[index % len(self.shapes)]

    def scaled(self, factor: float) -> Listed:
        return Listed(
            tuple(
                Shape(
                    one.input_len if one.prompt else max(1, round(one.input_len * factor)),
                    max(1, round(one.output_len * factor)),
                    one.prompt,
                )
                for one in self.shapes
            )
        )


# Maximum-likelihood fits (mean and standard deviation of the logarithm), cut at the trace's 99th
# percentile. `chat`: AzureLLMInferenceTrace_conv (Patel et al., Splitwise, ISCA 2024), 19,366
# requests. `rag`: RAGPulse (arXiv 2511.12979), 7,106 requests. `agents`: steps of coding agents,
# SyFI TraceLab (University of Washington), Claude: from the 50th and 90th percentile of the tokens
# that a step appends and of its output; the cached prefix of a step, 126,000 tokens in the median,
# is what --shared-prefix is for.
NAMED: dict[str, Drawn] = {
    "chat": Drawn(LogNormal(6.633, 0.985, 4142), LogNormal(5.019, 0.859, 601)),
    "rag": Drawn(LogNormal(7.908, 0.434, 5438), LogNormal(5.387, 0.776, 891)),
    "agents": Drawn(LogNormal(6.753, 1.428, 232_206), LogNormal(5.529, 1.476, 6571)),
}

_INPUT_KEYS = ("input_tokens", "input_length")
_OUTPUT_KEYS = ("output_tokens", "output_length")


def spread(text: str, option: str) -> Normal:
    """`MEAN` or `MEAN:SD`.

    Raises:
        ConfigError: it is not of that form.
    """
    mean, _, deviation = text.partition(":")
    try:
        found = Normal(float(mean), float(deviation or 0))
    except ValueError:
        found = Normal(0)
    if not (1 <= found.mean < math.inf and 0 <= found.deviation < math.inf):
        raise ConfigError(
            f"{option}: {text!r} is not valid; allowed: MEAN or MEAN:SD in tokens, such as 512 or "
            "512:64, with a mean of at least 1"
        )
    return found


def named(text: str) -> Lengths:
    """A name of NAMED, or the path of a file of JSON lines.

    Raises:
        ConfigError: neither, or the file is not valid.
    """
    if text in NAMED:
        return NAMED[text]
    path = Path(text)
    if not path.is_file():
        raise ConfigError(
            f"--lengths: {text!r} is neither a file nor one of {', '.join(NAMED)}"
            f"{did_you_mean(text, NAMED)}"
        )
    return read(path)


def read(path: Path) -> Listed:
    """A file of JSON lines: objects with `input_tokens` and `output_tokens` (or `input_length` and
    `output_length`, as in Mooncake's traces), or with `prompt` and `output_tokens`.

    Raises:
        ConfigError: a line is not such an object, or there is none.
    """
    shapes = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--lengths: {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            shapes.append(_shape(line, f"--lengths: {path}, line {number}"))
    if not shapes:
        raise ConfigError(f"--lengths: {path} has no line")
    return Listed(tuple(shapes))


def _shape(line: str, where: str) -> Shape:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: not a JSON object")
    prompt = found.get("prompt", "")
    if not isinstance(prompt, str):
        raise ConfigError(f"{where}: prompt is not a string")
    input_len = 0 if prompt else _count(found, _INPUT_KEYS, where)
    return Shape(input_len, _count(found, _OUTPUT_KEYS, where), prompt)


def _count(found: dict[str, Any], keys: tuple[str, ...], where: str) -> int:
    value = next((found[key] for key in keys if key in found), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {keys[0]} is {value!r}; allowed: a whole number of at least 1")
    return value


def draw_fitting(
    lengths: Lengths, source: random.Random, index: int, max_model_len: int | None
) -> Shape:
    """Draw until input and output together fit the model's context.

    Args:
        max_model_len: in tokens; None for no limit.

    Raises:
        ConfigError: they never do.
    """
    for offset in range(_MAX_DRAWS):
        shape = lengths.draw(source, index + offset)
        if max_model_len is None or shape.input_len + shape.output_len <= max_model_len:
            return shape
    raise ConfigError(
        f"the lengths do not fit the context of {max_model_len} tokens; choose shorter ones with "
        "--input-tokens and --output-tokens, or --lengths (--max-model-len sets another context)"
    )

"""Copies of GGUF files have the type that is asked for, and nothing else is changed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import requantized
import tiny_gguf

Kind = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_blocks_are_those_of_the_gguf_package(tmp_path: Path, kind: Kind) -> None:
    source = tiny_gguf.write_gguf(tmp_path / "source.gguf", Kind.Q8_0).path
    requantized.write(source, tmp_path / "copy.gguf", kind)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "copy.gguf")
    found = {one.name: one for one in after.tensors}
    assert list(found) == [one.name for one in before.tensors]
    rewritten = 0
    for one in before.tensors:
        other = found[one.name]
        if one.name.startswith("blk.") and len(one.shape) == 2:
            values = gguf.dequantize(one.data, one.tensor_type).astype(np.float32)
            assert other.tensor_type == kind
            assert np.array_equal(other.data, gguf.quantize(values, kind))
            rewritten += 1
        else:
            assert other.tensor_type == one.tensor_type
            assert np.array_equal(other.data, one.data)
    assert rewritten


def test_all_metadata_is_kept(tmp_path: Path) -> None:
    source = tiny_gguf.write_gguf(tmp_path / "source.gguf", Kind.Q8_0).path
    requantized.write(source, tmp_path / "copy.gguf", Kind.Q4_0)
    before, after = (
        {
            name: (field.types, field.contents())
            for name, field in gguf.GGUFReader(path).fields.items()
            if not name.startswith("GGUF.")
        }
        for path in (source, tmp_path / "copy.gguf")
    )
    assert after == before and "tokenizer.ggml.tokens" in before

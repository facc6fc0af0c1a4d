"""Copies of GGUF files whose linear layers have another type, made by the gguf package: what a type
costs in quality, beside our own rounding of the same weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def write(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write a copy of a file in which the matrices of all blocks have this type.

    Their values are those of the source's, dequantised. All else is copied as it is.

    Args:
        source: a GGUF file of little-endian values.
        target: the copy.
        kind: that the gguf package can write, such as F32 or Q4_0.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=False)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        items = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], items)
    for tensor in reader.tensors:
        is_linear = tensor.name.startswith("blk.") and len(tensor.shape) == 2
        if is_linear and tensor.tensor_type != kind:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    save(writer)


def save(writer: gguf.GGUFWriter) -> None:
    """Write all that was added, and close the file."""
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()

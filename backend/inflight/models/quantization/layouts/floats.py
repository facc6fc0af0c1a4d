"""Values of floats with few bits, by their codes."""

from __future__ import annotations

import torch

_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = torch.tensor(_MAGNITUDES + [-magnitude for magnitude in _MAGNITUDES])
"""[16] float32. FP4: from the highest bit a sign, two bits of exponent, one of mantissa."""

E8M0 = torch.tensor([2.0 ** (exponent - 127) for exponent in range(255)] + [torch.nan])
"""[256] float32. Powers of 2; the last code is NaN."""

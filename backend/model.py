"""What Triton loads: this folder is a backend directory of the name `inflight`."""

from inflight.triton.model import TritonPythonModel as TritonPythonModel

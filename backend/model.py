"""Entry point for Triton: this folder is the backend directory `inflight`."""

from inflight.triton.model import TritonPythonModel as TritonPythonModel

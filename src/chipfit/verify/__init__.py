"""Proof of a file: float, simulated and device results of the same inputs, compared tensor by tensor."""

from chipfit.verify.comparisons import BORDER, DEQUANTIZED_GAP, FLOAT_SHARE, OUTPUT_GAP
from chipfit.verify.file import verify_file
from chipfit.verify.run import default_runtime, verify
from chipfit.verify.verification import Verification

__all__ = [
    "BORDER",
    "DEQUANTIZED_GAP",
    "FLOAT_SHARE",
    "OUTPUT_GAP",
    "Verification",
    "default_runtime",
    "verify",
    "verify_file",
]

"""LayerNorm and RMSNorm."""

from kernelbook.layer_norm.op import layer_norm, rms_norm
from kernelbook.layer_norm.reference import layer_norm_backward_reference, layer_norm_reference, rms_norm_reference

__all__ = [
    "layer_norm",
    "layer_norm_backward_reference",
    "layer_norm_reference",
    "rms_norm",
    "rms_norm_reference",
]

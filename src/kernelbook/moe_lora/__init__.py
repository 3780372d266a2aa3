"""Products of routed tokens with the matrices of their experts, and a low-rank update for each expert."""

from kernelbook.moe_lora.op import Routing, moe_lora, route, scatter2scatter
from kernelbook.moe_lora.reference import (
    grouped_mm_rows,
    moe_lora_reference,
    route_reference,
    scatter2scatter_reference,
)

__all__ = [
    "Routing",
    "grouped_mm_rows",
    "moe_lora",
    "moe_lora_reference",
    "route",
    "route_reference",
    "scatter2scatter",
    "scatter2scatter_reference",
]

"""Decoders in compiled code: all layers of a step in one call (DESIGN: segments).

The model's own code stays the oracle, and runs every model that has no recipe here.
"""

from kvell.models.fused.decoder import FusedDecoder, fused_decoder

__all__ = ["FusedDecoder", "fused_decoder"]

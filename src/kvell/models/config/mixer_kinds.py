"""What kinds of state mixers there are (``mixers`` computes them)."""

from typing import Literal

MixerKind = Literal[
    "selective", "scalar-decay", "gated-delta", "channel-delta", "lightning", "convolution"
]

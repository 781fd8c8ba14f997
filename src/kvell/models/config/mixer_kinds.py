"""The kinds of state mixers (computed by ``states/mixers``)."""

from typing import Literal

MixerKind = Literal[
    "selective", "scalar-decay", "gated-delta", "channel-delta", "lightning", "convolution"
]

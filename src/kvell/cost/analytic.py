"""A cost model from a datasheet: the computing and reading of a step, and the device's two rates.

A step takes as long as the slower of computing and reading::

    seconds = overhead + max(flops / (peak × efficiency), bytes / (bandwidth × efficiency))

It serves machines without a calibration, and planning before there is a machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvell.cost.parallel import Parallel
from kvell.cost.work import Work
from kvell.memory import GroupPolicy

FLOPS_PER_WEIGHT = 2
FLOPS_PER_PAIR = 4
"""Scores and weighted values: a multiplication and an addition each, per number of a head."""


@dataclass(frozen=True)
class StepCost:
    """The operations and bytes of one step.

    :param flops: floating-point operations of all tokens, attention included.
    :param read_bytes: weights, and the KV that its tokens attend to.
    """

    flops: float
    read_bytes: float


@dataclass(frozen=True)
class DeviceProfile:
    """A device: rates in operations and bytes per second, efficiencies as fractions of them."""

    name: str
    peak_flops: float
    flops_efficiency: float
    bandwidth_bytes: float
    bandwidth_efficiency: float
    step_overhead_seconds: float

    def step_seconds(self, cost: StepCost) -> float:
        """Return the seconds of a step; they never fall when a part of the cost grows."""
        computing = cost.flops / (self.peak_flops * self.flops_efficiency)
        reading = cost.read_bytes / (self.bandwidth_bytes * self.bandwidth_efficiency)
        return self.step_overhead_seconds + max(computing, reading)


@dataclass(frozen=True)
class LayerCost:
    """Layers with one rule for the tokens that they read.

    :param policy: the tokens that are read; None for a state, which is read in every step.
    :param unit_bytes: of a token, or of a state, over all layers.
    """

    policy: GroupPolicy | None
    layers: int
    unit_bytes: int


@dataclass(frozen=True)
class ModelCost:
    """Work of one model, by its layers, independent of the pages of a manager.

    :param active_weights: numbers that one token is multiplied with.
    :param weight_bytes: bytes of weights that a step reads.
    :param query_size: query heads times head size: numbers that attend, per layer and token.
    """

    active_weights: int
    weight_bytes: int
    query_size: int
    layers: tuple[LayerCost, ...] = ()

    def of_step(self, work: Sequence[Work]) -> StepCost:
        tokens = sum(each.count for each in work)
        flops = float(FLOPS_PER_WEIGHT * self.active_weights * tokens)
        read_bytes = float(self.weight_bytes)
        for layer in self.layers:
            if layer.policy is None:
                read_bytes += layer.unit_bytes * len(work)
            else:
                live = layer.policy.live_tokens
                pairs = sum(each.count * (1 + live(each.start + each.count // 2)) for each in work)
                flops += FLOPS_PER_PAIR * self.query_size * layer.layers * pairs
                read_bytes += layer.unit_bytes * sum(live(each.start + each.count) for each in work)
        return StepCost(flops, read_bytes)


@dataclass(frozen=True)
class AnalyticModel:
    """A model on a device: a :class:`kvell.cost.model.CostModel`."""

    profile: DeviceProfile
    cost: ModelCost

    def step_seconds(self, work: Sequence[Work]) -> float:
        return self.profile.step_seconds(self.cost.of_step(work))


@dataclass(frozen=True)
class LinkProfile:
    """A link between two devices, or a device and its host.

    :param bandwidth_bytes: per second in one direction.
    :param bandwidth_efficiency: fraction of it that large messages reach.
    """

    name: str
    bandwidth_bytes: float
    bandwidth_efficiency: float
    latency_seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.bandwidth_bytes * self.bandwidth_efficiency

    def parallel(
        self, num_layers: int, token_bytes: int, *, tensor: int = 1, pipeline: int = 1
    ) -> Parallel:
        return Parallel(
            tensor, pipeline, num_layers, token_bytes, self.bytes_per_second, self.latency_seconds
        )

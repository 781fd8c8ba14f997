"""Several devices for one model, by stated constants (MemServe §5.3.2).

Tensor parallelism divides matrix multiplications and attention and leaves the rest whole (Amdahl's
law: the prefill of two devices does not take half the time); each layer sums up twice. Pipeline
parallelism does not shorten a step; it passes the step on between stages.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Parallel:
    """The number of devices, and the cost of their messages.

    :param tensor: devices that each layer is divided among.
    :param pipeline: stages, each with its part of the layers.
    :param num_layers: of the model; each sums up twice.
    :param token_bytes: of one token's hidden numbers.
    :param link_bytes_per_second: between two devices.
    :param message_latency_seconds: of a sum, or of passing on.
    :raises ValueError: for fewer than one device, or several without a link.
    """

    tensor: int = 1
    pipeline: int = 1
    num_layers: int = 0
    token_bytes: int = 0
    link_bytes_per_second: float = 0.0
    message_latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.pipeline < 1:
            raise ValueError(f"{self.tensor} × {self.pipeline} devices are none")
        if self.tensor * self.pipeline > 1 and self.link_bytes_per_second <= 0:
            raise ValueError("several devices need a link: give link_bytes_per_second")

    def message_seconds(self, tokens: int) -> float:
        """Return the seconds of the messages of a step of ``tokens``.

        A ring sums up in 2·(n − 1)/n of the bytes.
        """
        if self.tensor * self.pipeline == 1:
            return 0.0
        passing = tokens * self.token_bytes / self.link_bytes_per_second
        ring = 2 * (self.tensor - 1) / self.tensor
        sums = 2 * self.num_layers if self.tensor > 1 else 0
        hops = self.pipeline - 1
        return (sums + hops) * self.message_latency_seconds + (sums * ring + hops) * passing

    def stage_seconds(self, step_seconds: float) -> float:
        return step_seconds / self.pipeline


ALONE = Parallel()
"""One device."""

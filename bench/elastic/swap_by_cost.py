"""A swap rule of the replays: the seconds of a cost model on both sides."""

from kvell.cost.model import CostModel
from kvell.cost.swap_rule import WAYS, SwapRule
from kvell.cost.work import Chunk


class SwapByCost(SwapRule):
    """A rule that compares the seconds of a cost model.

    :param bytes_per_second: of the link between device and host, one way.
    :param most_tokens: computed in one step.
    """

    def __init__(self, model: CostModel, bytes_per_second: float, most_tokens: int) -> None:
        super().__init__(0.0)
        self.model, self.bytes_per_second, self.most_tokens = model, bytes_per_second, most_tokens

    def swaps(self, tokens: int, size_bytes: int) -> bool:
        """Compare a copy out and in with the steps; others pay the fixed part of a step."""
        if tokens <= 0:
            return False
        starts = range(0, tokens, self.most_tokens)
        work = [Chunk(start, min(self.most_tokens, tokens - start)) for start in starts]
        idle_seconds = self.model.step_seconds([Chunk(0, 1)])
        recompute_seconds = sum(self.model.step_seconds([chunk]) for chunk in work)
        recompute_seconds -= idle_seconds * len(work)
        return WAYS * size_bytes / self.bytes_per_second <= recompute_seconds

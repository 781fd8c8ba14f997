"""Input of the miss log, from requests and the memory core."""

from collections.abc import Sequence

from kvell.engine.protocol.pages import Miss
from kvell.engine.requests.misses import Admission, GroupHit, MissLog
from kvell.engine.requests.request import Request
from kvell.memory import VisibleCore, common_prefix, policy_of


class MissWatch:
    """A :class:`MissLog` over one memory core."""

    def __init__(self, core: VisibleCore, log: MissLog | None = None) -> None:
        self._core = core
        self._log = log or MissLog()

    @property
    def latest(self) -> tuple[Miss, ...]:
        return self._log.latest

    @property
    def counts(self) -> dict[str, int]:
        return self._log.counts

    def on_admitted(self, request: Request, step: int, running: Sequence[Request]) -> None:
        """Record the first admission of a request whose prefix was looked up.

        :param running: all running requests; may contain ``request``.
        """
        hit_tokens = request.cached_tokens or 0
        self._log.on_admitted(
            Admission(
                request.request_id,
                request.prompt,
                request.cache_root,
                request.model,
                step,
                hit_tokens,
            ),
            lambda: any(_computes(other, request, hit_tokens) for other in running),
            lambda: self._reaches(request),
        )

    def on_ended(self, request: Request, step: int) -> None:
        """Record the computed tokens of a request that ends."""
        tokens = request.tokens(0, request.settled)
        self._log.on_ended(tokens, request.cache_root, request.model, step)

    def _reaches(self, request: Request) -> list[GroupHit]:
        """Return how long a hit each group allows alone, of the groups that a hit requires."""
        lengths = self._core.reach(
            request.prompt,
            request.cache_root,
            images=request.images,
            prompt_tokens=len(request.prompt),
            model=request.model,
        ).tolist()
        return [
            GroupHit(group.name, length)
            for group, length in zip(self._core.layout.groups, lengths, strict=True)
            if length >= 0 and policy_of(group).required_for_hit
        ]


def _computes(other: Request, request: Request, hit_tokens: int) -> bool:
    if other is request or other.model != request.model or other.cache_root != request.cache_root:
        return False
    if other.settled >= len(other.prompt):
        return False
    return common_prefix(request.prompt, other.prompt) > max(hit_tokens, other.settled)

"""Shares of a host: the processors and the number of threads of each of its instances."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one instance.

    :param processors: numbers of the processors that it may run on.
    :param threads: number of threads that compute its steps.
    """

    processors: tuple[int, ...]
    threads: int


def processor_shares(processors: Sequence[int], instances: int) -> list[Share]:
    """Return a share for each instance.

    With at least as many processors as instances, each gets consecutive ones of its own, as evenly
    as possible, and a thread for each of them: threads of different instances never wait for each
    other in the middle of a step.  Consecutive numbers keep a share within one cache or socket on
    most machines.

    With fewer processors each instance has one thread, and may run on all of them.  Pinned, three
    instances on two processors would leave one instance with twice the speed of the others, and
    its processor idle when that instance is; the system's scheduler shares evenly.

    :raises ValueError: if there are no processors or no instances.
    """
    ordered = tuple(sorted(set(processors)))
    if not ordered or instances < 1:
        raise ValueError(f"nothing to share: {len(ordered)} processors, {instances} instances")
    if instances > len(ordered):
        return [Share(ordered, 1)] * instances
    each, extra = divmod(len(ordered), instances)
    shares, start = [], 0
    for index in range(instances):
        end = start + each + (index < extra)
        shares.append(Share(ordered[start:end], end - start))
        start = end
    return shares

"""The one device that prefill and decode instances do not support yet."""

from kvell.errors import ChangeSomething

FLAG = "--instances"


def pool_problem(device: str) -> ChangeSomething | None:
    """Return why requests cannot move between instances; None if they can.

    Mixed instances support every device, but on a GPU no request moves.
    """
    if device == "cpu":
        return None
    problem = "is not served by prefill and decode instances yet"
    return ChangeSomething("--device", device, problem, f"use --device cpu, or use {FLAG} mixed=N")

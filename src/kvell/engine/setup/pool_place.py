"""Options that prefill and decode instances do not support yet."""

from kvell.errors import ChangeSomething

FLAG = "--instances"


def pool_problem(
    *,
    device: str,
) -> ChangeSomething | None:
    """Return why requests cannot move between instances, and the flag to leave out; else None.

    This is the complete list.  Mixed instances support these options, but no request moves.
    """
    refused = {
        "--device": (device != "cpu", device, "use --device cpu"),
    }
    for flag, (is_refused, value, remedy) in refused.items():
        if is_refused:
            problem = "is not served by prefill and decode instances yet"
            return ChangeSomething(flag, value, problem, f"{remedy}, or use {FLAG} mixed=N")
    return None

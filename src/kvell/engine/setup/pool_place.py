"""What prefill and decode instances do not serve yet."""

from kvell.errors import ChangeSomething

FLAG = "--instances"


def check_pool_place(
    *,
    device: str,
    shares_memory: bool,
    has_buffer: bool,
    has_drafts: bool,
    plans_ahead: bool,
    models: int,
) -> None:
    """Refuse what prefill and decode instances do not serve yet; everything is named here.

    :raises ChangeSomething: with the flag to leave out.
    """
    refused = {
        "--device": (device != "cpu", device, "use --device cpu"),
        "--memory": (shares_memory, "…", "use --kv-memory"),
        "--cpu-buffer": (has_buffer, "…", "leave it out"),
        "--num-speculative-tokens": (has_drafts, "…", "leave it out"),
        "--async-scheduling": (plans_ahead, "on", "leave it out"),
        "--model": (models > 1, f"{models} models", "serve one"),
    }
    for flag, (is_refused, value, remedy) in refused.items():
        if is_refused:
            problem = "is not served by prefill and decode instances yet"
            raise ChangeSomething(flag, value, problem, f"{remedy}, or use {FLAG} mixed=N")

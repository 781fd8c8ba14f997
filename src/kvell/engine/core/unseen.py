"""Ends of requests that never reach the core."""

from dataclasses import replace

from kvell.engine.protocol.messages import Finished, Submit
from kvell.errors import ChangeSomething, TryLater
from kvell.vocabulary import FinishReason


def without_images(command: Submit) -> Finished:
    """Return the end of a request whose images are not in the store."""
    problem = ChangeSomething("images", "…", "are unknown", "give them with the prompt")
    return refused(command, problem)


def refused(command: Submit, problem: ChangeSomething | TryLater) -> Finished:
    """Return the end of a request that is refused for a problem."""
    end = replace(ended(command, "refused"), message=str(problem), bound=problem.bound)
    if isinstance(problem, TryLater):
        return replace(end, try_later=True)
    return replace(end, field=problem.field)


def ended(command: Submit, reason: FinishReason) -> Finished:
    """Return the end of a request that the core has never seen."""
    return Finished(command.request_id, command.attempt, reason, len(command.prompt) // 4)

"""How many prompt tokens a step may compute if several tenants have requests.

A step takes as long as its prompt tokens, and all others wait.  A tenant's prompts may delay its
own requests; those of others for a bounded time only, whatever the machine's speed is now.
"""

STEP_SECONDS = 0.4
"""About the longest step with prompts of one tenant and requests of another."""
FIRST_TOKENS = 128
"""The prompt tokens of such a step before any step was timed."""
LEAST_TOKENS = 32
"""The fewest prompt tokens, so that prompts advance beside many answers too."""
TIMED_TOKENS = 16
"""Steps with fewer tokens are not timed."""


class StepPace:
    """The speed of recent steps, and the prompt tokens that follow from it."""

    def __init__(self) -> None:
        self._token_seconds = STEP_SECONDS / FIRST_TOKENS

    def note(self, tokens: int, seconds: float) -> None:
        """Note a step's tokens and duration; a slow step counts at once, a fast one by half."""
        if tokens >= TIMED_TOKENS:
            latest = seconds / tokens
            self._token_seconds = max(latest, (latest + self._token_seconds) / 2)

    @property
    def shared_prompt_tokens(self) -> int:
        return max(LEAST_TOKENS, int(STEP_SECONDS / max(self._token_seconds, 1e-9)))

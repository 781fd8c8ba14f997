"""What stands in for a model and its device: tokens from the trace, seconds from a profile."""

from dataclasses import dataclass

from kvell.engine.plan import StepPlan, StepResult
from kvell.engine.proposals import verified
from kvell.memory import Layout
from kvell.simulator.model_cost import ModelCost
from kvell.simulator.profiles import DeviceProfile
from kvell.simulator.prompts import PromptMaker


@dataclass(frozen=True)
class Machine:
    """How long steps take: a device, and the model on it."""

    profile: DeviceProfile
    cost: ModelCost

    def step_seconds(self, layout: Layout, plan: StepPlan) -> float:
        """Virtual seconds of a step."""
        return self.profile.step_seconds(self.cost.of_step(layout, plan.work))


class TraceRunner:
    """Answers plans with the trace's output tokens (see ``engine.runner.Runner``)."""

    def __init__(self, prompts: PromptMaker) -> None:
        self._prompts = prompts

    def run(self, plan: StepPlan) -> StepResult:
        """A token for each work that samples, and more where guesses are the trace's tokens."""
        tokens = [
            self._prompts.output_token(int(work.request_id), work.output_index + index)
            for work in plan.work
            for index in range(work.num_logits)
        ]
        return verified(plan, tokens)

"""The figures of a line that a router reads are never old."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvell.cluster.instance_load import InstanceLoad
from kvell.cost.prices import pairs
from kvell.engine.protocol.messages import Heartbeat, OtherFronts
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.front.request_log import LogEntry
from kvell.vocabulary import RequestId
from tests.depth import machine
from tests.reports import facts, load


class LineMachine(RuleBasedStateMachine):
    """A line's requests come, compute, answer and go; its figures are looked at after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.line = InstanceLoad("mixed-0")
        self.computing: dict[str, LogEntry] = {}
        self.running: dict[str, LogEntry] = {}
        self.made: dict[str, int] = {}
        self.count = self.incarnation = 0
        self.others_tokens = self.others_requests = 0

    @rule()
    def opens(self) -> None:
        self.incarnation += 1
        self.line.lost()
        self.computing.clear()
        self.running.clear()
        self.others_tokens = self.others_requests = 0
        self.line.open(facts(8, self.incarnation, pool_bytes=9_000, token_bytes=2))

    @rule(tokens=st.integers(1, 50), hit=st.integers(0, 49))
    def adds(self, tokens: int, hit: int) -> None:
        self.count += 1
        name = RequestId(f"r{self.count}")
        entry = LogEntry(RequestSpec(name, bytes(4 * tokens), SamplingParams(max_tokens=5)), 0.0)
        entry.hit_tokens = min(hit, tokens - 1)
        self.line.add(entry)
        self.computing[name] = entry

    @precondition(lambda self: self.computing)
    @rule(index=st.integers(0, 9))
    def has_a_first_token(self, index: int) -> None:
        name = sorted(self.computing)[index % len(self.computing)]
        self.running[name] = self.computing.pop(name)
        self.line.on_tokens(self.running[name], 1)
        self.made[name] = 1

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), count=st.integers(1, 9))
    def has_more(self, index: int, count: int) -> None:
        name = sorted(self.running)[index % len(self.running)]
        self.line.on_tokens(self.running[name], count)
        self.made[name] += count

    @precondition(lambda self: self.running or self.computing)
    @rule(index=st.integers(0, 9))
    def ends(self, index: int) -> None:
        every = self.running | self.computing
        name = sorted(every)[index % len(every)]
        self.line.remove(every[name])
        self.running.pop(name, None)
        self.computing.pop(name, None)

    @rule(free_bytes=st.integers(0, 9_000), tokens=st.integers(0, 99), requests=st.integers(0, 9))
    def beats(self, free_bytes: int, tokens: int, requests: int) -> None:
        """Other fronts have something there too."""
        self.others_tokens, self.others_requests = tokens, requests
        self.line.on_heartbeat(Heartbeat(load(free_bytes, 9_000), OtherFronts(tokens, requests)))

    @rule(role=st.sampled_from(["mixed", "prefill", "decode"]))
    def changes_its_role(self, role: str) -> None:
        self.line.role = role

    @invariant()
    def the_figures_are_what_there_is(self) -> None:
        prompts, line = list(self.computing.values()), self.line
        own_tokens = sum(one.prompt_tokens for one in prompts)
        assert line.incarnation == self.incarnation
        assert line.own_prompt_tokens == own_tokens
        assert line.outstanding_prompt_tokens == own_tokens + self.others_tokens
        uncached = sum(max(1, one.prompt_tokens - one.hit_tokens) for one in prompts)
        assert line.uncached_prompt_tokens == uncached + self.others_tokens
        assert line.outstanding_pairs == sum(
            pairs(one.prompt_tokens, one.hit_tokens) for one in prompts
        )
        assert line.running_requests == len(self.running) + self.others_requests
        held = own_tokens + sum(
            one.prompt_tokens + self.made[name] for name, one in self.running.items()
        )
        assert line.held_tokens == (0 if line.role == "prefill" else held)
        assert line.pace.crowd.computing == bool(self.computing or self.running)
        outputs = [*prompts, *self.running.values()]
        assert line.outstanding_output_tokens == sum(one.pending_output_tokens for one in outputs)


def test_where_only_prompts_are_computed_nothing_is_held() -> None:
    """Its requests decode elsewhere."""
    line = InstanceLoad("prefill-0")
    line.open(facts(8, 1))
    line.add(LogEntry(RequestSpec(RequestId("one"), bytes(40), SamplingParams()), 0.0))
    assert line.held_tokens == 0
    line.role = "decode"
    assert line.held_tokens == 10


TestLine = LineMachine.TestCase
TestLine.settings = machine(40, 0.3)

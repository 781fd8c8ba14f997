"""Transfers under drawn schedules: whatever is lost, late, doubled or dies, and when."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvell.mempool.exchanges import FIRST_TICKS
from tests.depth import machine
from tests.mempool.transfers.network import STAGES, Network
from tests.mempool.transfers.runs import MIXES

texts = st.builds(
    lambda start, count: [start, *range(10, 10 + count)], st.integers(0, 2), st.integers(0, 30)
)
names = st.sampled_from("abc")


class TransfersMachine(RuleBasedStateMachine):
    """What arrives has the right content, and nothing leaks, whatever happens."""

    @initialize(mix=st.sampled_from(list(MIXES)), large=st.integers(6, 30))
    def start(self, mix: str, large: int) -> None:
        self.network = Network(MIXES[mix], large)
        for name in "abc":
            self.network.start(name)

    @rule(name=names, text=texts)
    def compute(self, name: str, text: list[int]) -> None:
        self.network.instances[name].compute(text)

    @rule(
        source=names,
        to=names,
        text=texts,
        more=st.integers(0, 3),
        inserts=st.booleans(),
        ticks=st.sampled_from([1, 10, 30, 30, 9_000]),
        fresh=st.booleans(),
        is_ready=st.booleans(),
    )
    def send(
        self,
        source: str,
        to: str,
        text: list[int],
        more: int,
        inserts: bool,
        ticks: int,
        fresh: bool,
        is_ready: bool,
    ) -> None:
        if fresh:
            self.network.instances[source].compute(text)
        whole = [*text, *[7] * more]
        self.network.send(source, to, whole, inserts, ticks, is_ready=is_ready)

    @rule(name=names, to=names, text=texts, ticks=st.integers(1, 30))
    def ask(self, name: str, to: str, text: list[int], ticks: int) -> None:
        if text:
            self.network.ask(name, to, text, ticks)

    @rule(name=names)
    def ready(self, name: str) -> None:
        self.network.ready(name)

    @rule(
        source=names,
        to=names,
        text=texts,
        inserts=st.booleans(),
        ticks=st.sampled_from([10, 30, 9_000]),
    )
    def announce(self, source: str, to: str, text: list[int], inserts: bool, ticks: int) -> None:
        """A text will be computed, and is to go on elsewhere."""
        self.network.announce(source, to, text, inserts, ticks)

    @rule(
        ways=st.permutations("abc"),
        text=texts,
        inserts=st.booleans(),
        ticks=st.sampled_from([10, 9_000]),
        times=st.integers(0, STAGES),
    )
    def stream(
        self, ways: list[str], text: list[int], inserts: bool, ticks: int, times: int
    ) -> None:
        """The same, with nothing lost until it is pulled."""
        source, to, _ = ways
        network, waiting = self.network, len(self.network.messages)
        if not network.announce(source, to, text, inserts, ticks):
            return
        network.hasten(waiting)
        network.begin_pass(source, -1)
        network.hasten(waiting)
        for _ in range(times):
            network.write(source, -1)

    @rule(name=names, index=st.integers(0, 3))
    def begin_pass(self, name: str, index: int) -> None:
        self.network.begin_pass(name, index)

    @rule(name=names, index=st.sampled_from([0, 0, 0, 1]), times=st.integers(1, 5))
    def write(self, name: str, index: int, times: int) -> None:
        for _ in range(times):
            self.network.write(name, index)

    @precondition(lambda self: self.network.messages)
    @rule(
        index=st.sampled_from([0, 0, 0, 1, 2, 7]),
        fate=st.sampled_from(["", "", "", "", "", "keeps", "loses"]),
    )
    def deliver(self, index: int, fate: str) -> None:
        self.network.deliver(index, keeps=fate == "keeps", loses=fate == "loses")

    @rule(name=names, index=st.integers(0, 5), count=st.integers(0, 9))
    def copy(self, name: str, index: int, count: int) -> None:
        self.network.copy(name, index, count)

    @rule(ticks=st.sampled_from([0, 1, 3, 5, FIRST_TICKS]))
    def pass_time(self, ticks: int) -> None:
        self.network.pass_time(ticks)

    @rule(name=names, chance=st.integers(0, 3))
    def crash(self, name: str, chance: int) -> None:
        if chance == 0:
            self.network.crash(name)

    @rule(name=names)
    def cancel(self, name: str) -> None:
        instance = self.network.instances[name]
        for transfer in sorted(instance.granted & instance.owners.keys())[:1]:
            self.network.act(instance, instance.sending.cancel(transfer, "nobody waits for it"))

    @invariant()
    def sound(self) -> None:
        for instance in getattr(self, "network", Network([], 0)).instances.values():
            assert all(transfer in instance.sending for transfer in instance.granted)

    def teardown(self) -> None:
        if not hasattr(self, "network"):
            return
        self.network.settle()
        for instance in self.network.instances.values():
            assert not len(instance.sending) and not len(instance.receiving)
            assert not len(instance.holds) and not instance.granted and not instance.copying
            assert not instance.passes
            assert not len(instance.agent.asking) and not len(instance.agent.copies)
            assert instance.asked.keys() == instance.fetched.keys()
            assert not any(instance.core.snapshot().used)


TestTransfers = TransfersMachine.TestCase
TestTransfers.settings = machine(50, 0.6)

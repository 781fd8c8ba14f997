"""``kvell replay --instances``: several instances behind a front, in virtual time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvell.cluster.instances import check_start, chosen_pd_caching, parse_instances
from kvell.cluster.steering.relief import Relief
from kvell.errors import ChangeSomething
from kvell.flags import setting, setting_of
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, PdCaching
from kvell.server.api.serve_options import ServeOptions

if TYPE_CHECKING:
    from kvell.cost.model import CostModel
    from kvell.cost.prices import ExecCosts
    from kvell.memory import LayerSpec
    from kvell.simulator.clock.links import Link
    from kvell.simulator.cluster.instance import Links
    from kvell.simulator.replay.runner import StepTimer

LINKS = {
    "a100": "nvlink-a100",
    "h100": "nvlink-h100",
    "h200": "nvlink-h100",
    "h800": "nvlink-h800",
    "l4": "pcie-4",
    "l40s": "pcie-4",
}
"""The usual link between devices of a machine, by the first part of a profile's name."""


@dataclass(frozen=True)
class Together:
    """The flags of several instances."""

    instances: str | None = setting(
        None,
        "--instances",
        "Several instances behind a front, like prefill=1,decode=2 or mixed=3.",
        metavar="ROLE=N,…",
    )
    routing: str = setting_of(ServeOptions, "routing")
    pd_caching: PdCaching | None = setting_of(PoolSettings, "pd_caching")
    relief: Relief = setting_of(PoolSettings, "relief")
    link: str | None = setting(
        None,
        "--link",
        "Between two instances: a name like nvlink-h100, or a TOML file."
        "  [default: as usual for the hardware]",
        metavar="LINK",
    )
    link_bandwidth: int | None = setting(
        None,
        "--link-bandwidth",
        "Bytes per second in one direction, like 25GB, in place of the link's.",
        "bytes",
    )

    def counts(self) -> dict[str, int] | None:
        """Return the number of instances of each role; None without the flag.

        :raises ChangeSomething: if these roles cannot serve requests together, or other flags are
            given without ``--instances``.
        """
        if self.instances is None:
            alone = {"--pd-caching": self.pd_caching, "--link": self.link}
            for flag, value in (alone | {"--link-bandwidth": self.link_bandwidth}).items():
                if value is not None:
                    problem = "is about several instances"
                    remedy = "add --instances prefill=1,decode=1"
                    raise ChangeSomething(flag, value, problem, remedy)
            return None
        counts = parse_instances(self.instances)
        check_start(counts)
        chosen_pd_caching(counts, self.pd_caching, "--pd-caching")
        return counts

    @property
    def caching(self) -> PdCaching:
        return DEFAULT_PD_CACHING if self.pd_caching is None else self.pd_caching

    def pages_link(self, hardware: str, machine: "StepTimer") -> "Link":
        """Return the link that carries pages between two instances.

        :raises ChangeSomething: if there is no such link, or the hardware has no usual link.
        """
        from kvell.simulator.clock.links import Link
        from kvell.simulator.hardware.profiles import load_link
        from kvell.simulator.replay.runner import CalibratedMachine

        usual = LINKS.get(Path(hardware).stem.partition("-")[0])
        name = self.link or usual
        if self.link is None and isinstance(machine, CalibratedMachine):
            rate = machine.calibration.copy_bytes_per_second
            return Link(bandwidth_bytes=float(self.link_bandwidth or rate))
        if name is None and self.link_bandwidth is None:
            problem = "does not say how its devices are connected"
            remedy = "use --link nvlink-h100, or --link-bandwidth 25GB"
            raise ChangeSomething("--hardware", hardware, problem, remedy)
        if name is None:
            return Link(bandwidth_bytes=float(self.link_bandwidth or 0))
        profile = load_link(name)
        rate = self.link_bandwidth or profile.bytes_per_second
        return Link(profile.latency_seconds, float(rate))

    def links(
        self, hardware: str, machine: "StepTimer", counts: Mapping[str, int]
    ) -> "Links | None":
        """Return the links between instances; None for one.

        :raises ChangeSomething: if there is no such link, or the hardware has no usual link.
        """
        from kvell.simulator.cluster.instance import Links

        return Links(self.pages_link(hardware, machine)) if sum(counts.values()) > 1 else None

    def hosts(self, machine: "StepTimer") -> dict[str, str] | None:
        """Return the hosts of :class:`.ClusterSpec`: one host for CPU pools, else None.

        Only instances with CPU pools lend each other memory.
        """
        from kvell.simulator.replay.runner import CalibratedMachine

        if not isinstance(machine, CalibratedMachine):
            return None
        return {} if machine.calibration.machine.device == "cpu" else None


def hardware_prices(
    machine: "StepTimer", links: "Links | None", layers: "Sequence[LayerSpec]", chunk_tokens: int
) -> "ExecCosts":
    """Return the prices of a model on the hardware of a cluster; the usual ones without links."""
    from kvell.cost.amounts import shape_of
    from kvell.cost.analytic import AnalyticModel
    from kvell.cost.prices import USUAL_PRICES, prices_of
    from kvell.simulator.replay.runner import CalibratedMachine, Machine

    if links is None or not isinstance(machine, CalibratedMachine | Machine):
        return USUAL_PRICES
    model: CostModel
    if isinstance(machine, CalibratedMachine):
        model = machine.calibration
    else:
        model = AnalyticModel(machine.profile, machine.cost)
    rate = links.pages.bandwidth_bytes
    return prices_of(
        model,
        shape_of(layers),
        fetch_bytes_per_second=rate,
        swap_bytes_per_second=rate,
        chunk_tokens=chunk_tokens,
    )

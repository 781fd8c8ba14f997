"""The command line of an instance process."""

import sys

from kvell.engine.setup.engine_settings import EngineSettings
from kvell.fleet.instance.price_settings import PriceSettings

USUAL = PriceSettings()
INHERITED = tuple(
    (
        "--socket-fd {socket_fd} --incarnation {incarnation} --processors {processors} "
        "--most-threads {threads} --memory-parts {memory_parts} --weights-fd {weights_fd} "
        "--instance-id {instance_id} --role {role} --pool-dir {pool_dir} --pd-caching "
        "{pd_caching} --page-transport {page_transport}"
    ).split()
)
"""Arguments that the front fills in at each start of an instance."""
PLACED = tuple(
    (
        "--incarnation {incarnation} --most-threads {threads} --memory-parts {memory_parts} "
        "--instance-id {instance_id} --role {role} --pool-name {pool_name} --pool-host {host} "
        "--pd-caching {pd_caching}"
    ).split()
)
"""The same for an instance on another machine, which fills in some of them."""


def instance_command(
    settings: EngineSettings, prices: PriceSettings = USUAL, *, debug: bool = False
) -> list[str]:
    """Return an instance's command line; the front fills in what is in braces."""
    return [sys.executable, "-m", "kvell.cli.main", *_words(settings, prices, debug), *INHERITED]


def placed_command(
    settings: EngineSettings, prices: PriceSettings = USUAL, *, debug: bool = False
) -> list[str]:
    return [*_words(settings, prices, debug), *PLACED]


def _words(settings: EngineSettings, prices: PriceSettings, debug: bool) -> list[str]:
    return ["instance", *settings.flags(), *prices.flags(), *(["--debug"] if debug else [])]

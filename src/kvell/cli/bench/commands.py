"""``kvell bench``: load of a server, throughput of the engine, statistics of workloads."""

import click

from kvell.cli.bench.offline import offline
from kvell.cli.bench.serve import serve
from kvell.cli.bench.workloads import workloads


@click.group()
def bench() -> None:
    """Measure: a server under load, the engine's throughput, what workloads look like.

    \b
    kvell bench serve --workload sharegpt-like --rate 2
    kvell bench offline smollm2 --workload loogle-like --num-requests 50
    kvell bench workloads
    """


for command in (serve, offline, workloads):
    bench.add_command(command)

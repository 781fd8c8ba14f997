"""The size of the CPU buffer: fixed sizes against Algorithm 2 (eLLM's figure 8).

See README.md beside this file.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.elastic.online import Bench, Seen, header, line, make_bench, write_case
from bench.elastic.online_cases import BOTH, CASES, INTRA, Side, mean_of

SIZES_GIB = (0.0, 2.0, 8.0, 32.0, 119.0)
"""Fixed logical sizes of the buffer; with 0, only preempted requests go there."""
RATES = (2.5, 0.18, 18.0, 0.2, 1.0)
"""Requests per second of each case: more than the static sides can serve in time."""
DRAWS = 5
"""Draws of lengths and arrivals: near the machine's limit, chance arrivals move one draw's first
tokens 5 % earlier or 20 % later."""
WITHIN = 0.10
"""Most by which Algorithm 2 may fall behind the best fixed size."""
SLOWER = 0.02
"""Most by which its whole run may be slower than one without a buffer."""


def fixed_sides() -> list[Side]:
    """Sides with a shared pool and a buffer of fixed size."""
    return [replace(BOTH, name=f"fixed {gib:g} GiB", fixed_gib=gib) for gib in SIZES_GIB]


def best_of(runs: dict[str, Seen]) -> str:
    """The fixed size with most requests in time; ties go to the earliest first token."""
    return max(runs, key=lambda name: (runs[name]["slo_attainment"], -_ttft(runs[name])))


def verdicts(chosen: Seen, off: Seen, fixed: dict[str, Seen]) -> list[str]:
    """Algorithm 2 beside the best fixed size, and beside none.

    :param off: the run without a buffer.
    """
    best = best_of(fixed)
    in_time, first = chosen["slo_attainment"], _ttft(chosen)
    most, soonest = fixed[best]["slo_attainment"], _ttft(fixed[best])
    seconds, without = chosen["virtual_seconds"], off["virtual_seconds"]
    checks = (
        (in_time >= (1 - WITHIN) * most, f"in time {in_time:.3f}, {best} {most:.3f}"),
        (first <= (1 + WITHIN) * soonest, f"TTFT {first:.2f} s, {best} {soonest:.2f} s"),
        (seconds <= (1 + SLOWER) * without, f"all in {seconds:.1f} s, off {without:.1f} s"),
    )
    return [f"{'holds' if holds else 'FAILS'}: {says}" for holds, says in checks]


def _ttft(seen: Seen) -> float:
    return float(seen["ttft_seconds"]["mean"])


def sweep(bench: Bench, rate: float, draws: int = DRAWS) -> dict[str, Any]:
    """Run all sizes of a case, each a mean over the same draws; print as results come."""
    print(header(bench), flush=True)
    drawn = [replace(bench, draw=draw, seen={}) for draw in range(draws)]
    runs: dict[str, Seen] = {}
    for side in (INTRA, *fixed_sides(), BOTH):
        runs[side.name] = mean_of([one.run(side, rate) for one in drawn])
        print(line(side.name, runs[side.name]), flush=True)
    fixed = {side.name: runs[side.name] for side in fixed_sides()}
    told = verdicts(runs[BOTH.name], runs[INTRA.name], fixed)
    print("\n".join(f"  {one}" for one in told), flush=True)
    found = {"case": asdict(bench.case), "rate": rate, "draws": draws}
    return found | {"runs": runs, "verdicts": told}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", help="a profile's name, if not each case's own")
    parser.add_argument("--link", default="pcie-4", help="to the host's memory, by name")
    parser.add_argument("--case", type=int, nargs="+", help="only these, by number from 0")
    parser.add_argument("--requests", type=int, help="of every case, if not its own number")
    parser.add_argument("--rate", type=float, help="of every case, if not its own")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of lengths and arrivals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Print every size of every case, and verdicts."""
    args = arguments()
    for number in args.case or range(len(CASES)):
        named = CASES[number]
        hardware = args.hardware or named.hardware
        case = replace(named, requests=args.requests or named.requests, hardware=hardware)
        found = sweep(make_bench(case, args.link), args.rate or RATES[number], args.draws)
        if args.json:
            write_case(number, found | {"link": args.link}, args.json)


if __name__ == "__main__":
    main()

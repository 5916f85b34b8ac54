"""Run acceptance figures: ``python -m tests.acceptance [WING [FIGURE ...]] [--list] [--again]``."""

import argparse
import os
import sys

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")  # figures are measured with XLA's optimizations on

import tests.conftest  # noqa: F401 - one thread, no network, before anything else is imported
from tests.acceptance._lane import Lane, find_wings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance", description=__doc__)
    parser.add_argument("wing", nargs="?", default="", help="a wing; all by default")
    parser.add_argument("figures", nargs="*", help="figures of that wing; all by default")
    parser.add_argument("--list", action="store_true", help="list the figures and what is required of them")
    parser.add_argument("--again", action="store_true", help="measure again what is already measured")
    arguments = parser.parse_args()
    lane = Lane(find_wings())
    if arguments.wing and arguments.wing not in lane.wings:
        parser.error(f"no wing {arguments.wing!r}: choose from {', '.join(lane.wings)}")
    chosen = [arguments.wing] if arguments.wing else list(lane.wings)
    known = {figure.name for wing in chosen for figure in lane.wings[wing]}
    if unknown := sorted(set(arguments.figures) - known):
        parser.error(f"no figure {unknown[0]!r}: choose from {', '.join(sorted(known))}")
    if arguments.list:
        for wing in chosen:
            for figure in lane.wings[wing]:
                print(f"{wing}/{figure.name}: {figure.claim} [{figure.required}]")
        return 0
    return 0 if lane.run(chosen, arguments.figures, arguments.again) else 1


if __name__ == "__main__":
    sys.exit(main())

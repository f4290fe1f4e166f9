"""`python -m linearize.kernels.bench [FAMILY ...] [--out FILE]`: print the table and store it."""

from __future__ import annotations

import argparse
import sys

from linearize.kernels.bench import FAMILIES, NeedsGpuError, kernel_rows, store, table


def main() -> int:
    """Exit code 2 without a CUDA GPU."""
    parser = argparse.ArgumentParser(prog="python -m linearize.kernels.bench", description=__doc__)
    parser.add_argument("family", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--out", help="also store the rows in this JSON file")
    parser.add_argument("--repeats", type=int, default=20, help="timings per row; default 20")
    arguments = parser.parse_args()
    try:
        rows = kernel_rows(arguments.family, arguments.repeats)
    except (NeedsGpuError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(table(rows))
    if arguments.out:
        store(rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

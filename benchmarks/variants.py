"""Write a llama target in another number type, or widened: a larger, memory-bound model that answers as before.

    python benchmarks/variants.py model.gguf -o model-q4_0.gguf --type q4_0
    python benchmarks/variants.py model.gguf -o widened-bf16.gguf --type bf16 --ffn 16384

See eagle3_cli/bench/widened.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eagle3_cli.bench.widened import TYPES, write_variant
from eagle3_cli.console import Console
from eagle3_cli.errors import Eagle3Error


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed, 2 bad input."""
    console = Console()
    args = _parser().parse_args(argv)
    begin = time.monotonic()
    try:
        write_variant(args.target, args.output, args.type, args.ffn)
    except Eagle3Error as error:
        console.error(error.message, error.hint)
        return error.exit_code
    seconds = time.monotonic() - begin
    console.report(f"{args.output}: {args.output.stat().st_size / 1e6:.0f} MB in {seconds:.1f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target", type=Path, metavar="GGUF", help="a model of the llama architecture")
    add("-o", "--output", type=Path, required=True, metavar="GGUF", help="replaced if it exists")
    add("--type", default="bf16", metavar="TYPE", help=f"{', '.join(TYPES)}; default: bf16")
    add("--ffn", type=int, metavar="N", help="the new feed-forward length; default: as it is")
    return parser


if __name__ == "__main__":
    sys.exit(main())

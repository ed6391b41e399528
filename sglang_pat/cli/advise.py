"""`sglang-pat advise`: does pat pay for a workload? The verdict and no more.

Needs neither SGLang nor a GPU. `sglang-pat replay` has the same answer with more options, rows and
a report.
"""

from __future__ import annotations

import argparse
import json
import sys

from sglang_pat.cli import workload_options
from sglang_pat.output_file import check_outputs, write_output

DESCRIPTION = "does pat pay? By a model's config.json and a trace of requests, without a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and the command itself as the default `run`."""
    workload_options.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Estimate and print. Returns the exit status: 0, or 2 for what cannot be done."""
    try:
        check_outputs({"--json": arguments.json}, workload_options.inputs(arguments))
        report = workload_options.read(arguments).answered()
    except (ValueError, OSError) as error:
        print(f"sglang-pat advise: {error}", file=sys.stderr)
        return 2
    workload_options.show(report, arguments.verbose)
    if arguments.json is not None:
        write_output("--json", arguments.json, json.dumps(report.as_dict(), indent=1) + "\n")
    return 0

"""`sglang-pat doctor`: is everything here that pat needs, and if not, what is to be done?

The arguments and the report. The checks are in `doctor.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from sglang_pat.output_file import output_file

if TYPE_CHECKING:
    from sglang_pat.cli.doctor import Check

DESCRIPTION = "check the GPU, the compilers, SGLang and the plug-in, and say what to do"

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and the command itself as the default `run`."""
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the checks as JSON"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check everything, print a table. The exit status is 1 if a check failed, else 0."""
    from rich.console import Console

    with _no_warnings():
        from sglang_pat.cli.doctor import all_checks, worst

        with Console(stderr=True).status("checking; SGLang takes a few seconds to import"):
            checks = all_checks()
    _print(checks)
    status = worst(checks)
    if arguments.json is not None:
        report = {"status": status, "checks": [asdict(check) for check in checks]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if status == "failed" else 0


@contextmanager
def _no_warnings() -> Iterator[None]:
    """What SGLang and torch say on every import is no finding. Errors still come through."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _print(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("", "check", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for check in checks:
        # As Text: brackets in what was found are no markup.
        rest = map(Text, (check.topic, check.found, check.advice))
        table.add_row(Text(check.status, style=_STYLES[check.status]), *rest)
    Console().print(table)

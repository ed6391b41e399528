"""SGLang's server with decode CUDA graphs: pat against SGLang's backends.

    python benchmarks/bench_serving.py [--backends pat fa3 flashinfer triton] [--json FILE]

8B shapes with random weights, written on the spot; one server after another, and everything with
one start of each. Cases: batches of requests that start together, for the time per output token and
the latencies that a client sees (serving/latency.py). Traffic: requests at rising rates, through
SGLang's own client (serving/traffic.py).

With --json every number is written as soon as it is there, and a file that exists is continued: so
backends, models and parts can be measured by one command each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metadata import gpu_id, gpu_state, metadata
from serving import latency, traffic
from serving.cases import cases_of, traffic_of
from serving.models import MODELS, ModelShape
from serving.results import Results
from serving.tables import console, show, show_failure

from sglang_pat.bench.server import REPLAN, Server, contender, running_server
from sglang_pat.cli.arguments import Parser, real_number, whole_number
from sglang_pat.output_file import output_file

PARTS = ("cases", "traffic")


def main() -> int:
    args = _arguments()
    results = Results(args.json, metadata())
    for name in args.models:
        for backend in args.backends:
            measure(MODELS[name], backend, args, results)
    show(results.cases, results.serving)
    for failure in results.failures:
        show_failure(f"{failure['backend']}, {failure['model']}: {failure['error']}")
    return 1 if results.failures else 0


def measure(model: ModelShape, backend: str, args: argparse.Namespace, results: Results) -> None:
    """All that is asked for of one backend, with one start of its server. A failure is recorded."""
    results.add_model(model)
    run: dict[str, Any] = {
        "backend": backend,
        "model": model.name,
        "command": " ".join(sys.argv),
        "gpu_id": gpu_id(),
    }
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
            path = model.write(Path(folder))
            console.print(f"{model.name}: starting the server with {backend}")
            with running_server(contender(backend), path, path, **model.arguments) as server:
                run["start_seconds"] = time.perf_counter() - begin
                console.print(f"  ready after {run['start_seconds']:.0f} s")
                if "cases" in args.parts:
                    _measure_cases(server, model, backend, args.cases, results)
                if "traffic" in args.parts:
                    _measure_traffic(server, model, backend, args.rates, path, results)
    except (RuntimeError, TimeoutError) as error:
        run["error"] = str(error)
    run["seconds"] = time.perf_counter() - begin
    results.add_run(run)


def _measure_cases(
    server: Server, model: ModelShape, backend: str, chosen: list[int] | None, results: Results
) -> None:
    for index, case in enumerate(cases_of(model)):
        if chosen is None or index in chosen:
            measured = _with_clocks(latency.measure, server, case, model.vocab_size)
            results.add_case(model, case, backend, measured)
            console.print(f"  {case.title}: {measured['tpot_ms']:.2f} ms per token")


def _measure_traffic(
    server: Server,
    model: ModelShape,
    backend: str,
    rates: list[float] | None,
    path: Path,
    results: Results,
) -> None:
    asked = traffic_of(model)
    for rate in rates or asked.rates:
        measured = _with_clocks(traffic.measure, server, asked, rate, path)
        results.add_serving(model.name, backend, rate, measured)
        console.print(f"  {rate:g} req/s: {measured['median_tpot_ms']:.2f} ms per token")


def _with_clocks(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    before = gpu_state()
    measured = function(*arguments)
    return measured | {"gpu": {"before": before, "after": gpu_state()}}


def _arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["pat", "fa3", "flashinfer", "triton"],
        metavar="NAME",
        help=f"SGLang's attention backends, or {REPLAN.name}: pat with new plans all the time "
        "(default: %(default)s)",
    )
    parser.add_argument("--models", nargs="+", default=["llama-3-8b"], choices=MODELS)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument(
        "--cases", nargs="+", type=whole_number(0, 1000), metavar="INDEX", help="only these cases"
    )
    parser.add_argument(
        "--rates", nargs="+", type=real_number(1e-3, 1e6), metavar="N", help="requests per second"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write all numbers to FILE"
    )
    args = parser.parse_args()
    for name in args.models:
        allowed = range(len(cases_of(MODELS[name])))
        if not set(args.cases or ()) <= set(allowed):
            parser.error(f"--cases {args.cases}: {name} has the cases {list(allowed)}")
    return args


if __name__ == "__main__":
    sys.exit(main())

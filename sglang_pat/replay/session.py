"""One replay from beginning to end: a trace and options in, the result out.

Puts the stages together: simulator, account, recorder. The replay imports SGLang here only.
"""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter

from sglang_pat.replay.account import Account, Measure, Recorder, totals
from sglang_pat.replay.options import ReplayOptions
from sglang_pat.replay.result import Result, TraceCounts
from sglang_pat.replay.simulate import Simulator
from sglang_pat.workload.trace import Trace

_PROGRESS_STEPS = 64  # between two reports of progress


class SGLangMissingError(RuntimeError):
    """The replay needs SGLang's radix tree, and SGLang cannot be imported."""


class Replay:
    """A trace on its way through the simulated server. SGLangMissingError without SGLang.

    measure: for sampled steps, e.g. kernels on a GPU. stop() may be called from a signal handler.
    """

    def __init__(
        self, trace: Trace, options: ReplayOptions, *, measure: Measure | None = None
    ) -> None:
        try:
            from sglang_pat.sglang.replay_tree import ReplayReader, ReplayRequest, new_tree
        except ImportError as error:
            raise SGLangMissingError(
                f"the replay runs SGLang's radix tree, but SGLang cannot be imported ({error}); "
                "pip install '.[sglang,replay]' in a clone"
            ) from error
        self._trace = trace
        self._options = options
        self._tree = new_tree(options.kv_tokens, options.page_size)
        self._account = Account(options.model, options.policies, options.workers)
        self._simulator = Simulator(
            trace, self._tree, ReplayReader(self._tree), self._account, options, ReplayRequest
        )
        self._recorder = Recorder(self._account, options, measure)
        self._seconds = 0.0

    @property
    def requests_done(self) -> int:
        """Requests that are finished or were refused."""
        served = self._simulator.served
        return served.finished + served.refused_context + served.refused_pool

    @property
    def steps_done(self) -> int:
        return self._simulator.served.steps

    def stop(self) -> None:
        """End after the current step; the result then says that it was interrupted."""
        self._simulator.stop = True

    def run(self, on_progress: Callable[[], None] | None = None) -> None:
        """Serve the trace. TraceError at a malformed line if the trace is strict."""
        started = perf_counter()
        add = self._recorder.add
        # SGLang's modules are millions of objects; no collection of the replay's has to visit them.
        gc.freeze()
        try:
            for step in self._simulator.steps():
                add(step)
                if on_progress is not None and step.number % _PROGRESS_STEPS == 0:
                    on_progress()
        finally:
            gc.unfreeze()
        self._seconds = perf_counter() - started
        if on_progress is not None:
            on_progress()

    def result(self) -> Result:
        """What has been counted until now."""
        served, trace = self._simulator.served, self._trace
        seconds = max(self._seconds, 1e-9)
        sums = totals(
            served, self._account, self._options, self._simulator.now, self._tree.mutations
        )
        if self._recorder.is_measured:
            from sglang_pat.replay.gpu import mean_times

            sums["gpu"] = mean_times(self._recorder.rows, self._options.model, self._options.time)
        return Result(
            meta={
                "sglang_pat": version("sglang-pat"),
                "sglang": version("sglang"),
                "tree": self._tree.name,
                "python": platform.python_version(),
                "interrupted": self._simulator.stop,
                "row_stride": self._recorder.stride,
                "seconds": round(seconds, 3),
                "steps_per_second": round(served.steps / seconds, 1),
            },
            trace=TraceCounts(
                name=trace.name,
                format=trace.format,
                requests=served.arrived,
                malformed=trace.errors.count,
                failed=trace.errors.failed,
                estimated=trace.errors.estimated,
                errors=[str(error) for error in trace.errors.first],
                input_tokens=served.input_tokens,
                output_tokens=served.output_tokens,
            ),
            config=self._options.as_dict(),
            totals=sums,
            steps=self._recorder.rows,
            capacity={},
            forest=self._recorder.forest(),
        )

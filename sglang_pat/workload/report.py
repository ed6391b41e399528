"""The report of a simulation as text and as JSON, with the verdict first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sglang_pat.messages import listed
from sglang_pat.model_layers import summary
from sglang_pat.workload.request_prompts import IMAGE_TOKENS
from sglang_pat.workload.run import DEFAULT, PAT, WorkloadAnswer
from sglang_pat.workload.trace import Trace
from sglang_pat.workload.verdict import Verdict

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A verdict and the data that it is based on.

    Attributes
    ----------
    trace
        The trace, read to its end, so that all malformed lines are known.
    """

    model: str
    workload: str
    trace: Trace
    answer: WorkloadAnswer
    verdict: Verdict

    def lines(self) -> list[str]:
        """Return lines: what was not replayed, then the verdict and its reasons, then notes."""
        verdict = self.verdict
        found = []
        if not_replayed := "; ".join(self.not_replayed()):
            found += textwrap.wrap(f"Not replayed: {not_replayed}.", _WIDTH)
        found += textwrap.wrap(verdict.sentence, _WIDTH)
        for text in (verdict.basis, f"Why: {verdict.why}", *self.notes()):
            found += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        return found

    def not_replayed(self) -> Iterator[str]:
        """Yield what was not replayed, and what the verdict therefore does not cover."""
        errors, refused = self.trace.errors, self.answer.refused
        if errors.count:
            yield f"{errors.count:,} malformed lines ({_short(str(errors.first[0]))})"
        if errors.is_cut:
            yield "the last line, which is cut short"
        for what, count in errors.left_out.items():
            yield f"{count:,} {what}"
        for count, limit in ((refused.context, "the context"), (refused.pool, "the KV pool")):
            if count:
                yield f"{count:,} requests longer than {limit}"

    def notes(self) -> Iterator[str]:
        """Yield remarks on the log, on estimates, and on an option of SGLang that would help."""
        errors, refused = self.trace.errors, self.answer.refused
        size = f"{errors.bytes_per_token:.2g} bytes are one token"
        if errors.assumed:
            yield f"Read from the lines: {errors.assumed}."
        if errors.counted:
            off = errors.by_text / errors.counted - 1
            yield (
                f"The prompts have {errors.counted:,} tokens by `usage`, which decides; 4 bytes a "
                f"token would make {errors.by_text:,}"
                + (f" ({off:+.0%})" if abs(off) > 0.1 else "")
                + "."
            )
        if errors.estimated:
            yield f"The prompts of {errors.estimated:,} requests are text: {size}."
        if errors.media:
            yield f"{errors.media:,} images count {IMAGE_TOKENS:,} tokens each, a guess."
        if errors.limited:
            yield (
                f"The log has no length of {errors.limited:,} answers: they count as long as they "
                "were allowed to be."
            )
        if errors.miscounted:
            yield f"usage counts other prompt tokens than {errors.miscounted:,} lists of ids hold."
        models = [name for name in errors.models if name]
        if len(models) > 1:
            yield (
                f"The log names {len(models):,} models ({listed(models)}): one server gets all "
                "requests, and models share nothing. Filter the log by model."
            )
        if errors.unknown:
            yield f"Keys of requests that are not known, and not read: {listed(errors.unknown)}."
        for what, count in errors.choices.items():
            yield f"{count:,} records {what}."
        if self.answer.by_weight is not None:
            fcfs, by_weight = self.answer.by_weight
            yield (
                f"--schedule-policy dfs-weight would serve {by_weight:.3g} instead of {fcfs:.3g} "
                "requests/s: first come first served computes prefixes more than once."
            )
        if refused.truncated:
            yield f"Cut where the context or the KV pool ends: {refused.truncated:,} answers."

    def details(self) -> list[str]:
        """Return the lines that `--verbose` adds."""
        answer = self.answer
        name = answer.setup.time.gpu.default_backend
        rows = [("", name, "pat"), *server_rows(answer)]
        found = ["", *(f"{label:<28}{left:>12}{right:>12}" for label, left, right in rows), ""]
        found.append(
            f"prompts: {answer.pat.prompt_tokens:,} tokens, {answer.distinct_tokens:,} distinct, "
            f"{answer.pat.new_tokens:,} computed with pat"
        )
        for count, words, accelerated in summary(answer.setup.time.layers):
            found.append(f"layers: {count} x {words}: {'pat' if accelerated else name}")
        found += ["KV tokens that an accelerated layer reads in all steps of the server with pat:"]
        found += [f"  {label:<16}{tokens:>12}{times:>12}" for label, tokens, times in reads(answer)]
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        answer, setup, errors = self.answer, self.answer.setup, self.trace.errors
        time = setup.time
        return {
            "verdict": self.verdict.as_dict(),
            "model": self.model,
            "gpu": time.gpu.name,
            "tp": time.tp,
            "dp": time.dp,
            "layers": [
                {"layers": count, "what": words, "accelerated": accelerated}
                for count, words, accelerated in summary(time.layers)
            ],
            "trace": {
                "name": self.trace.name,
                "format": self.trace.format,
                "malformed": errors.count,
                "left_out": errors.left_out,
                "is_cut": errors.is_cut,
                "estimated": errors.estimated,
                "prompt_tokens_by_usage": errors.counted,
                "prompt_tokens_by_text": errors.by_text,
                "bytes_per_token": round(errors.bytes_per_token, 3),
                "guessed_images": errors.media,
                "answers_at_their_limit": errors.limited,
                "models": errors.models,
                "unknown_keys": errors.unknown,
                "choices": errors.choices,
                "errors": [str(error) for error in errors.first],
                "refused": asdict(answer.refused),
                "distinct_tokens": answer.distinct_tokens,
            },
            "server": {
                "kv_tokens": setup.pool,
                "page_size": setup.page_size,
                "policies": list(setup.policies),
                **asdict(setup.rules),
            },
            DEFAULT: asdict(answer.default),
            PAT: asdict(answer.pat),
            "by_weight": answer.by_weight,
        }


def server_rows(answer: WorkloadAnswer) -> list[tuple[str, str, str]]:
    """Return rows: (name of a value, the value with the default backend, the value with pat)."""
    default, pat = answer.default, answer.pat

    def row(label: str, name: str, form: str) -> tuple[str, str, str]:
        left, right = (format(getattr(each, name), form) for each in (default, pat))
        return label, left, right

    return [
        row("ms per output token", "tpot_ms", ",.1f"),
        row("ms to the first token", "ttft_ms", ",.0f"),
        row("ms of a decode step", "step_ms", ",.1f"),
        row("requests in a step", "batch", ",.1f"),
        row("attention in a step", "attention", ".0%"),
        row("prefill in the time", "prefill", ".0%"),
        row("KV reads that repeat", "repeats", ".0%"),
        row("prompt tokens computed", "new_tokens", ","),
        row("requests retracted", "retracted", ","),
        row("seconds for all", "seconds", ",.0f"),
        ("requests per second at most", f"{answer.most[DEFAULT]:.3g}", f"{answer.most[PAT]:.3g}"),
    ]


def reads(answer: WorkloadAnswer) -> list[tuple[str, str, str]]:
    """Return rows: (policy, KV tokens, factor by which query-centric attention reads more)."""
    tokens = answer.pat.kv_tokens
    most = tokens["query-centric"]
    return [
        (name, f"{count / 1e6:,.1f} M", f"{most / count:.2f}x" if count else "-")
        for name, count in tokens.items()
    ]


def _short(text: str, longest: int = 120) -> str:
    """Return a text from the trace, shortened to one line."""
    return textwrap.shorten(text, longest, placeholder=" ...")

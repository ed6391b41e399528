"""The checks of `sglang-pat doctor` that ask SGLang: is `pat` registered, can it be hooked in?

Beside the pipeline. In this process only: nothing that is done here outlives the command.
"""

from __future__ import annotations

from sglang.srt.plugins import load_plugins

from sglang_pat.doctor import Check
from sglang_pat.sglang_plugin import NAME


def check_registration() -> Check:
    """Whether `pat` is an attention backend once SGLang has loaded its plug-ins."""
    load_plugins()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    missing = [
        where
        for where, names in (
            ("the attention registry", ATTENTION_BACKENDS),
            ("the choices of --attention-backend", ATTENTION_BACKEND_CHOICES),
        )
        if NAME not in names
    ]
    if missing:
        return Check(
            "registration",
            "failed",
            f"{NAME} is missing from {' and '.join(missing)}",
            "look for 'Failed to execute general plugin: pat' in SGLang's log, and report it",
        )
    return Check("registration", "ok", f"{NAME} can be chosen by --attention-backend")


def check_hooks() -> Check:
    """Whether the hooks find what they are put on."""
    try:
        from sglang_pat.sglang_batch import install_hooks

        install_hooks()
    except Exception as error:  # an import of SGLang's may raise anything
        advice = "use a supported version of SGLang"
        return Check("hooks", "failed", f"{type(error).__name__}: {error}", advice)
    return Check("hooks", "ok", "applied to SGLang in this process")

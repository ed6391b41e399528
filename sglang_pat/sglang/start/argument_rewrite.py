"""Makes SGLang resolve its arguments as if the user had not chosen `pat`.

SGLang adapts page sizes, dtypes and options to the name of the attention backend, and refuses
unknown names for some models. So this module first removes `pat`, and SGLang adapts everything to
its default backend. That backend prefills, and decodes the layers that fall back. The choice of pat
is stored on the arguments object, because SGLang pickles that object for its processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from sglang_pat import support
from sglang_pat.sglang.compat import resolved, unset_arguments
from sglang_pat.sglang.start.environment import Environment
from sglang_pat.sglang.start.server_options import early_reason
from sglang_pat.support import BACKEND

# Attributes that pat sets on ServerArgs. They are not fields, so dumps of the arguments leave them
# out. _ASKED_FOR: True or a `_ChoiceForRay` if the user chose pat. _NAMED_DRAFT: the backend that
# the user named for the draft model, because SGLang overwrites this option for some algorithms.
_ASKED_FOR = "_sglang_pat_decodes"
_NAMED_DRAFT = "_sglang_pat_draft_backend"
_ALL_MODES = "attention_backend"
_PREFILL, _DECODE = f"prefill_{_ALL_MODES}", f"decode_{_ALL_MODES}"
_DRAFT = "speculative_draft_attention_backend"


def around_resolution(resolve: Callable[[Any], None], arguments: Any) -> None:
    """Hook AROUND the method of ServerArgs that resolves arguments. SGLang may call it repeatedly.

    Raises ValueError if `pat` is chosen only for prefill or for a draft model, if an environment
    variable of pat is wrong, or if strict mode is on and pat decodes nothing with these options.
    Raises RuntimeError if SGLang has put `pat` back.
    """
    options = (_ALL_MODES, _PREFILL, _DECODE, _DRAFT)
    asks = BACKEND in [getattr(arguments, name) for name in options]
    if asks and not is_asked_for(arguments):
        Environment.read()
        _substitute(arguments)
    resolve(arguments)
    if is_asked_for(arguments):
        _check(arguments)
        if Environment.read().strict and (reason := early_reason(arguments)):
            raise reason.refusal()


def is_asked_for(arguments: Any) -> bool:
    """Return True if the user chose `pat` for decode."""
    return bool(getattr(arguments, _ASKED_FOR, False))


def named_draft_backend(arguments: Any) -> str | None:
    """Return the backend that the user named for the draft model, or None."""
    name: str | None = getattr(arguments, _NAMED_DRAFT, None)
    return name


def _substitute(arguments: Any) -> None:
    """Remove `pat` from the arguments, so that SGLang fills in the default backend."""
    chosen = {each: getattr(arguments, each) for each in (_ALL_MODES, _PREFILL, _DECODE)}
    if getattr(arguments, _DRAFT) == BACKEND:
        raise ValueError(
            f"--speculative-draft-attention-backend {BACKEND}: leave the option out: "
            "pat decodes draft models where it can, beside the backend that SGLang chooses"
        )
    decode = chosen[_DECODE] or chosen[_ALL_MODES]
    if decode != BACKEND:
        prefill = chosen[_PREFILL] or chosen[_ALL_MODES]
        raise ValueError(
            f"pat only decodes, but the backend for decode is {decode or 'not given'}, for prefill "
            f"{prefill}; use --attention-backend {BACKEND} or --decode-attention-backend {BACKEND}"
        )
    with_ray = getattr(arguments, "use_ray", False)
    setattr(arguments, _ASKED_FOR, _ChoiceForRay() if with_ray else True)
    setattr(arguments, _NAMED_DRAFT, getattr(arguments, _DRAFT))
    unset_arguments(arguments, [each for each in chosen if chosen[each] == BACKEND], BACKEND)


class _ChoiceForRay:
    """The choice of pat. Unpickling it loads the plug-ins, which SGLang's Ray actors do not."""

    def __new__(cls) -> Self:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        return super().__new__(cls)


def _check(arguments: Any) -> None:
    """Raise RuntimeError if `pat` is still one of the attention backends."""
    for name in (_ALL_MODES, _PREFILL, _DECODE):
        if resolved(arguments, name) == BACKEND:
            raise RuntimeError(not_substituted(f"{name} is still {BACKEND!r}"))


def not_substituted(found: str) -> str:
    """Return the error message for an SGLang in which the substitution had no effect."""
    return (
        f"pat was not substituted while SGLang resolved its arguments: {found}; "
        f"{support.SUPPORTED_SGLANG}"
    )

"""Imports of the fork server of `fakes.forks`, once for all processes of engines."""

import gc

from fakes.forks import pass_on_sigquit, patch_methods_alone
from sglang_pat.sglang.cpu import enable_cpu_engine

gc.disable()  # imports make objects that stay
pass_on_sigquit()
enable_cpu_engine()  # before SGLang is imported

import sglang.srt.managers.detokenizer_manager  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401  # imports the models

patch_methods_alone()
gc.freeze()  # processes need not copy them to count them
gc.enable()

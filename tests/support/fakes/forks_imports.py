"""The modules that the fork server of `fakes.forks` imports for all engine processes."""

import gc

from fakes.forks import pass_on_sigquit, patch_methods_alone
from sglang_pat.sglang.cpu import enable_cpu_engine

gc.disable()  # imported objects are never freed
pass_on_sigquit()
enable_cpu_engine()  # must precede the import of SGLang

import sglang.srt.managers.detokenizer_manager  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401  # imports the models

patch_methods_alone()
gc.freeze()  # garbage collection then does not copy their pages
gc.enable()

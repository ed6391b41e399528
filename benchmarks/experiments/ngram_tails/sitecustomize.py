"""Makes NGRAM servers of `experiments speculation` copy prompts like SGLang 0.5.23.

In every step, the n-gram worker of SGLang 0.5.17 copies each prompt twice to read its end, which
with 64 prompts of 8,448 tokens takes most of a step. The worker of 0.5.23 copies only the end.
"""

import importlib.abc
import importlib.util
import sys
from array import array

_WORKER = "sglang.srt.speculative.ngram_worker"
_TOKENS = 64  # more than an n-gram has


def _end(tokens):
    """Replaces `list` in the worker, where prompts are arrays."""
    return list(tokens[-_TOKENS:] if isinstance(tokens, array) else tokens)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.list = _end

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())

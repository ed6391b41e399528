"""On PYTHONPATH of NGRAM's servers of `experiments speculation`: what SGLang 0.5.23 does.

In every step the n-gram worker of SGLang 0.5.17 copies each prompt twice to use its end: at 64
prompts of 8,448 tokens most of a step, whatever the backend. That of 0.5.23 copies the end.
"""

import importlib.abc
import importlib.util
import sys
from array import array

_WORKER = "sglang.srt.speculative.ngram_worker"
_TOKENS = 64  # more than an n-gram has


def _end(tokens):
    """In place of `list` in the worker: prompts are arrays."""
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

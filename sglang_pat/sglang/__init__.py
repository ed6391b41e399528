"""The SGLang plug-in. docs/design/index.md follows a decode step through it.

When SGLang starts, `plugin.py` registers the backend, `start/` decides which layers pat decodes,
and `attach.py` gives SGLang's own backend the methods of `backend.py`. Plain decode steps do not
use `speculative/` (verify steps and draft models).

`touchpoints.txt` lists every place where pat changes what SGLang does.
"""

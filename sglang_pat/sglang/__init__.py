"""The SGLang plug-in, and a map of its modules.

A decode step:

1. SGLang makes a batch and runs it. Hooks record the requests (`tree/request_tracker.py`), because
   backends get a copy of the batch that lacks them.
2. SGLang calls its backend once per step. The methods that pat overrides (`backend.py`) pass the
   step to the planner (`step/planner.py`).
3. If the step repeats the last one, the planner only counts it (`step/repeated_steps.py`).
4. Otherwise the planner reads the step's inputs, and the radix-tree paths of requests that joined
   or moved (`tree/batch_builder.py`, `tree/radix_paths.py`). Both form a `DecodeBatch`.
5. `PackAttention.plan()` reuses the last plan or makes a new one (`step/step_plans.py`). Layers
   with sliding windows have their own plan (`sglang_pat/window.py`).
6. For each layer, the KV of the new tokens is stored (`layer/kv_writes.py`), and
   `PackAttention.run()` attends (`layer/attention.py`).
7. Counters go to the log, metrics and a stats file (`report/`). Reports do not affect decode.

When SGLang starts, `plugin.py` registers the backend, `start/` decides which layers pat decodes,
and `attach.py` gives SGLang's own backend the methods of `backend.py`.

Skip `speculative/` (verify steps and draft models) at first: plain decode steps do not use it.

`touchpoints.txt` lists every place where pat changes what SGLang does.
"""

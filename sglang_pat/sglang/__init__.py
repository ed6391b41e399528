"""The plug-in, and the map of it: one decode step, and every place where pat touches SGLang.

A decode step:

1. SGLang makes a batch and runs it. Hooks note its requests (`tree/request_tracker.py`): the batch
   that a backend sees has lost them.
2. SGLang asks its backend for metadata. Methods that pat overrides (`backend.py`) pass the step to
   the planner (`step/planner.py`).
3. If the step repeats the last one, the planner counts it and is done (`step/plan_reuse.py`).
4. Otherwise it reads the step's inputs and the radix-tree paths of requests that joined or moved
   (`tree/batch_builder.py`, `tree/radix_paths.py`). Together they are a `DecodeBatch`.
5. `PackAttention.plan()` reuses the last plan or makes a new one (`layer/step_plans.py`).
6. For each layer, the KV of the new tokens is stored (`layer/kv_writes.py`), and
   `PackAttention.run()` attends (`layer/attention.py`).
7. Counters go to the log, metrics and a stats file (`report/`). They change nothing.

What happens once, when SGLang starts: `plugin.py` registers the backend, `start/` decides which
layers pat decodes, and `attach.py` gives a backend of SGLang the methods of `backend.py`.

Skip `speculative/` (verify steps and draft models) and `offline/` (what `doctor` and `replay` use)
until you need them: no plain decode step passes them.

`TOUCHPOINTS` lists where pat changes what SGLang does. A test compares it with the code, and
`plugin.missing_touchpoints()` with the SGLang that is installed.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Touchpoint(NamedTuple):
    """A place where pat changes what SGLang does.

    Attributes
    ----------
    kind
        See `TOUCHPOINTS`.
    target
        `module:path` in SGLang. The last part may be `a|b`: its names in different versions.
    name
        The attribute, field or variable, if it is not the last part of the target.
    not_in
        The supported version of SGLang that does not have the target. pat does without it there.
    module
        The module of this package that does it.
    why
        What pat needs it for.
    """

    kind: str
    target: str
    name: str | None
    not_in: str | None
    module: str
    why: str


# name       pat adds its name to a registry
# hook       a function of pat runs around or after a method, by SGLang's registry of hooks
# wrapper    pat replaces a method of one object
# override   the subclass that a backend becomes has a method of its own
# class      an object gets another class
# attribute  pat keeps a note on an object
# value      pat sets a field or a variable of SGLang
_TABLE = """
Registration, in every process:

name       server_args:add_attention_backend_choices
           plugin: --attention-backend pat
name       server_args:add_deterministic_attention_backend_choices
           plugin: --enable-deterministic-inference with pat
name       server_args:add_radix_supported_deterministic_attention_backend_choices
           plugin: the same with a prefix cache
name       layers.attention.attention_registry:ATTENTION_BACKENDS
           plugin: register pat, and wrap each factory so that its backend decodes through pat
attribute  layers.attention.attention_registry:ATTENTION_BACKENDS = _sglang_pat_wrapped
           plugin: mark a factory that is wrapped already
hook       server_args:ServerArgs.resolve_once|__post_init__
           plugin: let SGLang resolve its arguments as if pat had not been asked for
attribute  server_args:ServerArgs = _sglang_pat_decodes
           start.argument_rewrite: remember that pat was asked for
attribute  server_args:ServerArgs = _sglang_pat_draft_backend
           start.argument_rewrite: remember which backend was asked for the draft model
value      server_args:ServerArgs
           start.argument_rewrite: unset what names pat, so that SGLang chooses a default

The batch and the radix tree:

hook       model_executor.forward_batch_info:ForwardBatch.init_new
           tree.request_tracker: note the requests of a batch while they are known
attribute  model_executor.forward_batch_info:ForwardBatch = _sglang_pat_requests
           tree.request_tracker: keep these requests on the batch, or on its drafts
hook       model_executor.model_runner:ModelRunner._forward_raw
           tree.request_tracker: know which batch runs now
hook       managers.schedule_batch:Req.reset_for_retract
           tree.request_tracker: learn that a request has lost its KV slots
wrapper    mem_cache.radix_cache:RadixCache.insert
           tree.radix_paths: count
wrapper    mem_cache.radix_cache:RadixCache._evict|evict
           tree.radix_paths: count
wrapper    mem_cache.radix_cache:RadixCache.checkpoint|cache_unfinished_req
           tree.radix_paths: count, and read the path of the request again
wrapper    mem_cache.radix_cache:RadixCache.inc_lock_ref
           tree.radix_paths: count
wrapper    mem_cache.radix_cache:RadixCache.dec_lock_ref
           tree.radix_paths: count
wrapper    mem_cache.radix_cache:RadixCache.reset
           tree.radix_paths: count, and read all paths again
wrapper    mem_cache.radix_cache:RadixCache._split_node
           tree.radix_paths: count
attribute  mem_cache.radix_cache:RadixCache = _sglang_pat_events
           tree.radix_paths: keep the counts with the cache that they are of
attribute  beam_search.beam_group:BeamGroup = _sglang_pat_rows (not in 0.5.17)
           tree.row_groups: keep the rows of a beam search, which have no Req of their own
value      model_executor.forward_batch_info:ForwardBatch = out_cache_loc
           layer.kv_writes: make slots of latent KV contiguous, as SGLang's kernel expects them
hook       managers.scheduler:Scheduler.get_init_info
           report.layer_report: say in /server_info which layers pat decodes

The default backend. A target without a module is a member of
layers.attention.base_attn_backend:AttentionBackend, which all backends inherit:

class      __class__
           backend: decode through pat; prefill stays as it is
attribute  __class__ = _pat
           backend: keep the planner, and the plans of the last step
value      needs_cpu_seq_lens
           attach: have SGLang give the lengths on the host, which plans are made of
override   init_forward_metadata
           backend: plan an eager step
override   init_forward_metadata_out_graph
           backend: plan a step before its graph is captured or replayed
override   init_forward_metadata_in_graph
           backend: keep the default backend out of graphs in which it has no layers
override   init_cuda_graph_state
           backend: allocate the buffers that graphs read
override   forward_decode
           backend: attend in a decode step
override   get_fused_kv_write_buffers (not in 0.5.17)
           backend: keep models from storing KV by metadata that is not prepared
override   shared_read_ends (not in 0.5.17)
           backend: tell the scheduler when it may write to what a step reads

Speculative decoding only:

override   verify_mask
           speculative.backends: take the masks of drafts over the drafts alone
override   update_verify_buffers_to_fill_after_draft
           speculative.backends: skip what only the default backend prepares
override   draft_extend_metadata_captured_in_graph
           speculative.backends: be asked before each replay of draft extend
override   supports_draft_extend_metadata_staging (not in 0.5.17)
           speculative.backends: the same
override   forward_extend
           speculative.backends: attend in a verify step
hook       model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.load_batch
           speculative.draft_requests: know the requests of a verify step that is prepared early
hook       speculative.draft_utils:DraftBackendFactory.create_decode_backend
           speculative.attach: let a draft model decode through pat
hook       speculative.draft_utils:DraftBackendFactory.create_draft_extend_backend
           speculative.attach: let a draft model read verified drafts through pat
hook       speculative.eagle_worker_v2:EagleDraftWorker._capture_cuda_graphs
           speculative.attach: capture draft extend, which SGLang captures over few backends
value      speculative.eagle_worker_v2:EagleDraftWorker = cuda_graph_runner_for_draft_extend
           speculative.attach: the graphs that were captured
wrapper    speculative.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner.execute
           speculative.attach: return no hidden states of STANDALONE drafts, like eager steps
value      layers.logits_processor:LogitsProcessorOutput = hidden_states
           speculative.attach: the hidden states that are not returned
hook       speculative.multi_layer_eagle_draft_extend_cuda_graph_runner:
           MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.prepare
           speculative.attach: know the requests of the drafts that these graphs show
hook       speculative.dflash_worker_v2:DFlashWorkerV2.init_attention_backends
           speculative.attach: let a draft model give blocks through pat
hook       speculative.dspark_components.dspark_worker_v2:DSparkWorkerV2.init_attention_backends
           speculative.attach: the same
hook       speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation
           speculative.draft_requests: know the requests whose blocks are drafted
hook       speculative.dspark_components.dspark_worker_v2:DSparkWorkerV2.forward_batch_generation
           speculative.draft_requests: the same
value      speculative.ngram_worker:USE_FULL_MASK
           speculative.tree_attention: have SGLang make masks over the drafts alone
value      speculative.ngram_info:NgramVerifyInput = custom_mask
           speculative.tree_attention: make such a mask full again, for a layer that falls back
"""
_ROW = re.compile(r"(\w+) +([\w.]+:\s*\S+|\S+)(?: = (\w+))?(?: \(not in (\S+)\))?\n +(\S+): (.+)")


def _touchpoint(kind: str, target: str, *rest: str) -> Touchpoint:
    if ":" not in target:
        target = f"layers.attention.base_attn_backend:AttentionBackend.{target}"
    target = "".join(target.split())
    return Touchpoint(kind, f"sglang.srt.{target}", *rest)


TOUCHPOINTS = tuple(_touchpoint(*match.groups()) for match in _ROW.finditer(_TABLE))

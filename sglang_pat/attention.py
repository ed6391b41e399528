"""PackAttention: the runtime API. Call plan() once per decode step, and run() once per layer.

PackAttention calls the C++ scheduler to plan, and an executor to run the plan. SGLang's backend
calls it, and so can any code that has radix paths and a paged KV pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Literal, NoReturn, Protocol, overload

import numpy as np
import torch

from sglang_pat import support
from sglang_pat._scheduler import CostModel, PackScheduler, PrefixForest
from sglang_pat.argument_checks import (
    canonical_device,
    check_dtypes,
    check_ids,
    check_latent_values,
    check_number,
    check_per_request,
    check_positive,
    check_scale,
    check_seq_lens,
    check_shape,
    check_tensor,
)
from sglang_pat.batch import DecodeBatch, IntArray, PrefixPaths, Step, check_integers
from sglang_pat.executors.calibration import costs_of
from sglang_pat.executors.cuda import CudaExecutor
from sglang_pat.executors.invariant_reference import InvariantExecution
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.layer import LayerInputs, Scale
from sglang_pat.executors.loaded_kernels import LoadedKernels, load_kernels
from sglang_pat.executors.reference import PlanExecution, ReferenceExecutor
from sglang_pat.executors.window_rows import Window, WindowRows
from sglang_pat.messages import listed, quoted
from sglang_pat.plan import BufferSizes, DecodePlan, HeadConfig, KvTokens, new_scheduler
from sglang_pat.reasons import StepReason
from sglang_pat.stats import PlanningKind, PlanningTime, PlanStats
from sglang_pat.support import GROWTH_TOKENS

logger = logging.getLogger(__name__)

# Number of workers per KV head in plain torch, large enough for plans to cut long ranges in tests.
_TORCH_WORKERS = 32
# The error message of torch.compile(fullgraph=True). Without fullgraph, torch breaks its graph and
# calls run().
_NO_FULL_GRAPH = (
    "PackAttention.run() cannot be part of torch.compile(fullgraph=True): its kernels and the plan "
    "are unknown to torch; compile without fullgraph, or the code before and after it"
)
_SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Executor(Protocol):
    """Executes plans. `ReferenceExecutor` uses torch, and `CudaExecutor` the kernels.

    A step begins with load_plan(), which loads the scheduler's last plan, or with reuse_plan(). One
    run() per layer follows. With `gather`, reuse_plan() reads the slots of shared KV again, because
    they may have changed since the last step. window_rows and refill() are for layers with a window
    (`WindowAttention`).
    """

    name: str

    @property
    def window_rows(self) -> WindowRows | None: ...

    def load_plan(self, scheduler: PackScheduler, step: Step) -> DecodePlan: ...

    def reuse_plan(self, step: Step, *, gather: bool = False) -> None: ...

    def refill(self) -> None: ...

    def sharing_buffers(self) -> Executor: ...

    def run(self, layer: LayerInputs) -> None: ...


class PackAttention:
    """Decode attention that reads every shared KV prefix once.

        attention = PackAttention(32, 8, 128, dtype=torch.bfloat16)   # heads, KV heads, head_dim
        attention.plan(batch, req_to_token=..., req_pool_indices=..., seq_lens=...)   # each step
        out = attention.run(q, k_cache, v_cache)                                      # each layer

    Not thread-safe. The plan and its buffers belong to this object, which can be neither copied nor
    pickled.
    """

    _window: Window | None = None  # WindowAttention sets it before it calls __init__

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        v_head_dim: int | None = None,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        policy: str = "memory",
        num_workers: int | None = None,
        growth_tokens: int = GROWTH_TOKENS,
        executor: Literal["auto", "cuda", "reference"] = "auto",
        max_requests: int | None = None,
        max_shared_slots: int = 1 << 20,
        batch_invariant: bool = False,
        max_seq_len: int | None = None,
    ) -> None:
        """Check the arguments and choose defaults for the device.

        Parameters
        ----------
        num_qo_heads, num_kv_heads : int
            Heads of this rank. `num_qo_heads` is a multiple of `num_kv_heads`.
        head_dim : int
            Elements of a query and of a key, and of a value unless `v_head_dim` is given. 576 with
            `v_head_dim` 512 and one KV head means latent attention (MLA, absorbed).
        dtype : torch.dtype
            dtype of queries and outputs.
        v_head_dim : int, optional
            Elements of a value and of an output. Default: `head_dim`.
        kv_dtype : torch.dtype, optional
            dtype of the KV cache: float8_e4m3fn, float8_e5m2 or `dtype`, the default.
        device : torch.device or str
            Device of all tensors.
        policy : str
            How requests are divided into packs: one of `sglang_pat.support.POLICIES`.
        num_workers : int, optional
            How many CTAs share the work of one KV head. The default depends on the device.
        growth_tokens : int
            plan() builds a new plan when a request has grown by more tokens than this. If the CTAs
            get out of balance, it builds one earlier, but not before a request has grown by 32
            tokens.
        executor : {"auto", "cuda", "reference"}
            `cuda` runs the kernels, `reference` plain torch. `auto` chooses the kernels on a CUDA
            device, except for float32, for which there are no kernels.
        max_requests : int, optional
            Allocate the buffers now, for batches of up to this many requests. Their addresses never
            change, so run() can be captured in a CUDA graph and replayed with other plans. Plain
            torch refuses the same plans as the kernels. Default: buffers grow with the batches.
        max_shared_slots : int
            With `max_requests`: the most KV tokens of all shared ranges of a batch together.
        batch_invariant : bool
            Make a request's output have the same bits in every batch, whatever KV is shared. The
            output then depends only on the request's queries and KV, and on the device. `policy`
            has no effect.
        max_seq_len : int, optional
            The most KV tokens of a request, to reserve partials. Required for `batch_invariant`
            with `max_requests`, and refused without both.

        Raises
        ------
        ValueError, TypeError
            Something is unsupported. The message names the value and what is supported.
        """
        check_integers(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            growth_tokens=growth_tokens,
            max_shared_slots=max_shared_slots,
        )
        optional = {
            "v_head_dim": v_head_dim,
            "num_workers": num_workers,
            "max_requests": max_requests,
            "max_seq_len": max_seq_len,
        }
        check_integers(**{name: value for name, value in optional.items() if value is not None})
        if not isinstance(batch_invariant, bool):
            raise TypeError(f"batch_invariant must be True or False, got {quoted(batch_invariant)}")
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.shape = shape = HeadConfig(num_qo_heads, num_kv_heads, head_dim, v_head_dim)
        self.dtype = dtype
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        check_shape(shape)
        check_dtypes(dtype, self.kv_dtype)
        if policy not in support.POLICIES:
            raise support.unsupported("packing policy", listed([policy]))
        self.device = canonical_device(device)
        self._batch_invariant = batch_invariant
        self.is_reserved = max_requests is not None
        kernels = self._load_kernels(executor)
        if num_workers is None:
            num_workers = default_workers(kernels, num_kv_heads)
        self._num_workers = num_workers
        layers = {"latent": shape.is_latent, "one_byte": self.kv_dtype.itemsize == 1}
        self._new_scheduler = partial(
            new_scheduler,
            group_size=shape.group_size,
            num_workers=num_workers,
            policy=policy,
            growth_tokens=growth_tokens,
            batch_invariant=batch_invariant,
            one_tile=batch_invariant and kernels is not None and not kernels.config.tiles_agree,
            by_time=kernels is not None,
            cost=CostModel() if kernels is None else costs_of(self.device, **layers),
            **layers,
            **({} if self._window is None else self._window.rule()),
        )
        if max_shared_slots < 0:
            raise ValueError(f"max_shared_slots must not be negative, got {max_shared_slots}")
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(f"max_seq_len must be at least 1, got {max_seq_len}")
        if max_seq_len is not None and not (batch_invariant and self.is_reserved):
            raise ValueError(
                "max_seq_len only reserves partials of batch_invariant with max_requests; without "
                f"both it has no effect, got {max_seq_len}"
            )
        sizes = None
        if max_requests is not None:
            sizes = self._reservation(max_requests, max_shared_slots, max_seq_len)
        self._executor: Executor
        if kernels is None:
            execution = InvariantExecution if batch_invariant else PlanExecution
            self._executor = ReferenceExecutor(self.device, execution, self._window, sizes)
        else:
            self._executor = CudaExecutor(kernels, num_qo_heads, self.device, sizes, self._window)
        self._begin()

    def _reservation(
        self, max_requests: int, max_shared_slots: int, max_seq_len: int | None
    ) -> BufferSizes:
        """Return the sizes of buffers for batches of up to `max_requests` requests."""
        if self._batch_invariant:
            if max_seq_len is None:
                raise ValueError("batch_invariant with max_requests needs max_seq_len")
            return BufferSizes.for_invariant(max_requests, max_shared_slots, max_seq_len)
        sizes = BufferSizes.for_requests(
            max_requests,
            max_shared_slots,
            self._num_workers,
            self.shape.group_size,
            latent=self.shape.is_latent,
            one_byte=self.kv_dtype.itemsize == 1,
        )
        return sizes if self._window is None else sizes._replace(num_cuts=int(max_requests))

    def _begin(self) -> None:
        """Set the state before the first step: no plan, and all counters 0."""
        self.stats = PlanStats()
        self._scheduler = self._new_scheduler()
        self._plan: DecodePlan | None = None
        self._step: Step | None = None  # tensors of the last plan()
        self._num_requests = 0  # number of requests in the plan
        self._key: Hashable = None
        # These attributes describe the last step. plan_together() sets only its last object's
        # step_time.
        self.step_kind: PlanningKind = "cold"
        self._cause: StepReason | None = None  # why a plan was built
        self.step_tokens = KvTokens(0, 0, 0)
        self.step_time = PlanningTime("cold", 0)
        self.seq_lens: IntArray = np.zeros(0, dtype=np.int32)
        self._checked_table: object = ()  # the last step's req_to_token

    def plan(
        self,
        batch: DecodeBatch,
        *,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> DecodePlan:
        """Prepare the next calls of run(): reuse the last plan, or build a new one.

        The tensors are on `device`. They and `batch.seq_lens` are borrowed until the next plan(),
        and must not change before the last run() of the step. A CUDA graph reads the tensors of the
        plan() before its capture: write the values of later steps into these tensors.

        Parameters
        ----------
        batch : DecodeBatch
            The step as host data.
        req_to_token : torch.Tensor
            int32 `[num_rows, max_context_len]`: the KV slot of every position of every row.
        req_pool_indices : torch.Tensor
            int64 or int32 `[num_requests]`: the row of each request.
        seq_lens : torch.Tensor
            int64 or int32 `[num_requests]`: the values of `batch.seq_lens`. Except in
            batch-invariant mode, the length of a request with KV after its path may be one token
            less here, or a few tokens more. Each run() and each replay of a captured graph reads
            the lengths. Plain torch refuses other lengths. The kernels do not check them, because
            the host would have to wait for the device.

        Returns
        -------
        DecodePlan
            A view, valid until plan() builds another plan.

        Raises
        ------
        ValueError, TypeError
            Bad input. The last plan stays valid, with one exception: if plan() has built a new plan
            and the executor then refuses the step, for example because of a stride, there is no
            plan.
        PlanOverflowError
            A reservation is too small. There is no plan then.
        """
        begun_ns, step, lengths = self._check_step(batch, req_to_token, req_pool_indices, seq_lens)
        plan = self._update_plan(batch, step, lengths)
        self._count_step(begun_ns)
        return plan

    def _check_step(
        self,
        batch: DecodeBatch,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> tuple[int, Step, tuple[bool, int, int]]:
        """Check the arguments of plan(). Return when it began, the step and `check_lengths`."""
        # This code runs in every step, so it must be fast.
        if not isinstance(batch, DecodeBatch):
            raise TypeError(f"batch must be a DecodeBatch, got {type(batch).__name__}")
        begun_ns = batch.begun_ns or time.perf_counter_ns()
        if type(begun_ns) is not int:
            raise TypeError(f"batch.begun_ns must be an integer, got {quoted(begun_ns)}")
        if batch.key.__hash__ is None:  # may change in place, and then equals itself
            raise TypeError(f"batch.key must be hashable, got {quoted(batch.key)}")
        lens = batch.seq_lens
        check_seq_lens(lens)
        if req_to_token is not self._checked_table:
            check_ids("req_to_token", req_to_token, 2, (torch.int32,), self.device)
            self._checked_table = req_to_token
        check_per_request("req_pool_indices", req_pool_indices, lens, self.device)
        check_per_request("seq_lens", seq_lens, lens, self.device)
        lengths = self._scheduler.check_lengths(lens)
        _, _, longest = lengths
        if longest > (width := req_to_token.shape[1]):
            raise ValueError(
                f"seq_lens must be at most req_to_token's width {width}, got {longest}"
            )
        return begun_ns, Step(req_to_token, req_pool_indices, seq_lens, lens), lengths

    def _update_plan(
        self, batch: DecodeBatch, step: Step, lengths: tuple[bool, int, int] | None = None
    ) -> DecodePlan:
        """Reuse the last plan, or build one. Does not count the step.

        lengths: the result of `check_lengths` for the batch, or None if it was not called yet.
        """
        paths = batch.read_paths() if batch.key is None else None
        key = batch.key if paths is None else paths_key(paths)
        total = 0  # tokens of the step, if its batch is that of the plan
        if self._plan is None:
            self._cause = StepReason.FIRST
        elif key != self._key or len(batch.seq_lens) != self._num_requests:
            self._cause = StepReason.BATCH_CHANGED
        else:
            served, total, _ = lengths or self._scheduler.check_lengths(batch.seq_lens)
            self._cause = None if served else StepReason.TAIL_GROWTH
        if self._cause is None:
            self._executor.reuse_plan(step, gather=paths is not None)
            self.step_kind = "unchanged"
        else:
            self.step_kind = self._build(batch, paths, key, step)
        assert self._plan is not None
        self._step = step
        tokens = self._plan.kv_tokens
        if self._cause is None:
            growth = total - tokens.query_centric
            tokens = KvTokens(total, tokens.planned + growth, tokens.lower_bound + growth)
        self.step_tokens = tokens
        self.seq_lens = batch.seq_lens
        return self._plan

    def _count_step(self, begun_ns: int) -> None:
        self.step_time = PlanningTime(self.step_kind, time.perf_counter_ns() - begun_ns)
        self.stats.count_step(self.step_tokens, self.step_time, self._cause)

    def advance(self, seq_lens: torch.Tensor, tokens: int) -> None:
        """Use the last plan for a later step with longer requests.

        This is for a few steps after plan(), if the host knows only by how many tokens the requests
        have grown since plan(). `stats` does not count these steps.

        Parameters
        ----------
        seq_lens : torch.Tensor
            As in plan(), on the device.
        tokens : int
            By how many tokens each request, except padding, is longer than in plan().

        Raises
        ------
        ValueError, TypeError
            Bad input, or batch-invariant mode, in which plans depend on the lengths. The last step
            stays valid.
        RuntimeError
            There is no plan.
        """
        if self._step is None or self._plan is None:
            raise RuntimeError("advance() needs a plan: call plan() first")
        if self._batch_invariant:
            raise ValueError("advance() is not batch-invariant; call plan() for each step")
        check_integers(tokens=tokens)
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        planned = self.seq_lens
        check_per_request("seq_lens", seq_lens, planned, self.device)
        longest = int(planned.max(initial=0)) + tokens
        width = self._step.req_to_token.shape[1]
        if longest > width:
            raise ValueError(
                f"requests must be at most as long as req_to_token's width {width}, got {longest}"
            )
        fixed = planned > 0
        fixed[self._plan.live_requests()] = False
        if tokens and fixed.any():
            raise ValueError(
                f"request {fixed.argmax()} has no KV after its path, so the plan "
                f"reads {tokens} too few of its tokens; call plan()"
            )
        lens = np.where(planned > 0, planned + np.int32(tokens), 0)
        self._executor.reuse_plan(self._step._replace(seq_lens=seq_lens, host_seq_lens=lens))

    @overload
    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        q_rope: torch.Tensor | None = ...,
        out: torch.Tensor | None = ...,
        sm_scale: float | None = ...,
        logit_cap: float = ...,
        sinks: torch.Tensor | None = ...,
        k_scale: Scale = ...,
        v_scale: Scale = ...,
        return_lse: Literal[False] = ...,
    ) -> torch.Tensor: ...

    @overload
    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        q_rope: torch.Tensor | None = ...,
        out: torch.Tensor | None = ...,
        sm_scale: float | None = ...,
        logit_cap: float = ...,
        sinks: torch.Tensor | None = ...,
        k_scale: Scale = ...,
        v_scale: Scale = ...,
        return_lse: Literal[True],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        q_rope: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        sm_scale: float | None = None,
        logit_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of one layer by the last plan.

        All tensors are on `device`. The caches have dtype `kv_dtype`, queries and output `dtype`.
        The output has no gradient, autocast has no effect, and torch.compile() breaks its graph
        here, or raises with fullgraph=True.

        Plain torch reads any strides. The kernels need dense columns and addresses and strides in
        multiples of 16 bytes; in the caches and in `out` the heads of a row lie side by side, and
        `out` and `sinks` are contiguous. Rows of the caches may have gaps between them.

        Parameters
        ----------
        q : torch.Tensor
            `[num_requests, num_qo_heads, head_dim]`; with `q_rope` `[num_requests, num_qo_heads,
            v_head_dim]`.
        k_cache, v_cache : torch.Tensor
            `[num_slots, num_kv_heads, head_dim]` and `[num_slots, num_kv_heads, v_head_dim]`,
            SGLang's pool layout. They include this step's token. Pages of the layout NHD are passed
            as `pages.flatten(0, 1)`. In latent attention `v_cache` is the view
            `k_cache[..., :v_head_dim]`.
        q_rope : torch.Tensor, optional
            Only for latent attention: `[num_requests, num_qo_heads, head_dim - v_head_dim]`, the
            last columns of the queries, if they are in a separate tensor.
        out : torch.Tensor, optional
            `[num_requests, num_qo_heads, v_head_dim]`; written. It must not overlap another
            tensor. Allocated by default.
        sm_scale : float, optional
            Scale of the logits. Default: `head_dim ** -0.5`.
        logit_cap : float
            If positive, logits become `logit_cap * tanh(logit / logit_cap)`. Latent attention has
            none.
        sinks : torch.Tensor, optional
            Attention sinks, float32, bfloat16 or float16 `[num_qo_heads]`: one more logit per head,
            without a value. This logit is neither scaled nor capped. The kernels read the tensor in
            each run() and each replay of a graph, so it may be updated in place.
        k_scale, v_scale : float or torch.Tensor
            Factors by which the keys and the values in the caches are multiplied. A captured graph
            keeps the value of a float. A tensor (float32, one element) is read in each run() and
            each replay. A tensor is allowed only if `kv_dtype` is not `dtype`.
        return_lse : bool
            Also return the LSE, by which results over disjoint KV can be merged.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            `out`; with `return_lse` also the natural-log LSE, float32 `[num_requests,
            num_qo_heads]`. The LSE includes the sink. A request of length 0 has output 0. Its LSE
            is -inf without sinks, else the sink.

        Raises
        ------
        ValueError, TypeError
            Bad input. Nothing is written.
        RuntimeError
            There is no plan. Nothing is written.
        """
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(_NO_FULL_GRAPH)
        if self._plan is None:
            raise RuntimeError("run() needs a plan: call plan() first")
        if type(return_lse) is not bool:
            raise TypeError(f"return_lse must be True or False, got {quoted(return_lse)}")
        num_heads, _, head_dim, v_head_dim = self.shape
        out_shape = (self._num_requests, num_heads, v_head_dim)
        self._check_queries(q, q_rope)
        self._check_caches(k_cache, v_cache)
        if out is not None:
            check_tensor("out", out, out_shape, (self.dtype,), self.device)
            if 0 in [s for s, n in zip(out.stride(), out_shape, strict=True) if n > 1]:
                raise ValueError(f"out must not overlap itself, got strides {out.stride()}")
        check_number("logit_cap", logit_cap)
        if logit_cap != 0:
            check_positive("logit_cap", logit_cap, "0 (off) or positive")
            if self.shape.is_latent:
                raise ValueError(f"latent attention has no logit_cap, got {logit_cap}")
        for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_scale(name, factor, self.dtype, self.kv_dtype, self.device)
        if sinks is not None:
            check_tensor("sinks", sinks, (num_heads,), _SINK_DTYPES, self.device)
        scale = head_dim**-0.5 if sm_scale is None else sm_scale
        check_positive("sm_scale", scale)
        out = q.new_empty(out_shape) if out is None else out
        lse = None
        if return_lse:
            lse = q.new_empty(out_shape[:2], dtype=torch.float32)
        self._executor.run(
            LayerInputs(
                q, k_cache, v_cache, out, lse, scale, logit_cap, sinks, k_scale, v_scale, q_rope
            )
        )
        return out if lse is None else (out, lse)

    def _check_queries(self, q: torch.Tensor, q_rope: torch.Tensor | None) -> None:
        num_heads, _, head_dim, v_head_dim = self.shape
        q_dim = head_dim
        if q_rope is not None:
            if not self.shape.is_latent:
                raise ValueError("q_rope belongs to latent attention; pass whole queries as q")
            q_dim = v_head_dim
            rope_shape = (self._num_requests, num_heads, head_dim - v_head_dim)
            check_tensor("q_rope", q_rope, rope_shape, (self.dtype,), self.device)
        check_tensor("q", q, (self._num_requests, num_heads, q_dim), (self.dtype,), self.device)

    def _check_caches(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        _, num_kv_heads, head_dim, v_head_dim = self.shape
        dtypes = (self.kv_dtype,)
        check_tensor("k_cache", k_cache, (None, num_kv_heads, head_dim), dtypes, self.device)
        check_tensor("v_cache", v_cache, (None, num_kv_heads, v_head_dim), dtypes, self.device)
        if k_cache.shape[0] != v_cache.shape[0]:
            raise ValueError(
                "k_cache and v_cache must have the same number of slots, got "
                f"{list(k_cache.shape)} and {list(v_cache.shape)}"
            )
        if self.shape.is_latent:
            check_latent_values(k_cache, v_cache)

    def sharing_buffers(self) -> PackAttention:
        """Return a PackAttention for other batches that uses the buffers of this object.

        The same captured CUDA graph can then run the plans of both objects. Each object sends its
        plan to the device again if the plan of the other object has replaced it. ValueError if this
        object was made without `max_requests`.
        """
        if not self.is_reserved:
            raise ValueError("only buffers that never move can be shared: pass max_requests")
        sibling = object.__new__(type(self))
        sibling.__dict__.update(self.__dict__)
        sibling._executor = self._executor.sharing_buffers()
        sibling._begin()
        return sibling

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a PackAttention cannot be copied or pickled: it has a plan and buffers on a device; "
            "make another one, or take its sharing_buffers()"
        )

    def steps_left(self) -> int:
        """Return for how many more steps the plan is usable if requests grow by a token per step.

        Padding rows do not grow. Returns 0 without a plan.
        """
        if self._step is None or self._plan is None:
            return 0
        return self._scheduler.steps_left(self.seq_lens, self._step.req_to_token.shape[1])

    @property
    def executor(self) -> str:
        """The executor that runs the plans: "cuda" or "reference"."""
        return self._executor.name

    def _load_kernels(self, name: str) -> LoadedKernels | None:
        """Return the kernels of executor `name`, compiled if needed, or None for plain torch."""
        on_gpu = self.device.type == "cuda"
        if name not in ("auto", "cuda", "reference"):
            raise ValueError(f"executor must be auto, cuda or reference, got {quoted(name)}")
        if name == "cuda" and not on_gpu:
            raise ValueError(f"executor cuda needs a CUDA device, got device {self.device}")
        if name == "auto" and on_gpu and self.dtype == torch.float32:
            logger.warning("no CUDA kernels for float32: decode runs in plain torch, slowly")
            name = "reference"
        if name == "reference" or not on_gpu:
            return None
        _, _, head_dim, v_head_dim = self.shape
        config = KernelConfig.for_device(
            self.dtype, head_dim, self.device, v_head_dim, self.kv_dtype
        )
        with torch.cuda.device(self.device):
            return load_kernels(config, torch.cuda.current_device())

    def _build(
        self, batch: DecodeBatch, read_paths: PrefixPaths | None, key: Hashable, step: Step
    ) -> PlanningKind:
        """Plan the batch. read_paths: its paths if they were already read."""
        kind: PlanningKind = "cold"
        if isinstance(batch.paths, PrefixForest):
            self._scheduler.plan(batch.paths, batch.seq_lens)
            # A request has outgrown the plan, or only some requests have joined or left.
            if key == self._key or batch.paths.num_kept:
                kind = "changed"
        else:
            paths = batch.read_paths() if read_paths is None else read_paths
            self._scheduler.plan(
                paths.path_begin, paths.node_id, paths.kv_begin, paths.kv_end, batch.seq_lens
            )
        self._plan = None  # if the executor refuses the new plan, there is no plan
        self._plan = self._executor.load_plan(self._scheduler, step)
        self._num_requests = len(batch.seq_lens)
        self._key = key
        return kind


def plan_together(
    attentions: Sequence[PackAttention], batch: DecodeBatch, **tensors: torch.Tensor
) -> list[DecodePlan]:
    """Plan the same step for several kinds of layers, and check its tensors only once.

    attentions: objects on the same device. Only the last of them counts the step in its `stats`.
    tensors: as in `PackAttention.plan`, which says what is returned, borrowed and raised. If a plan
    is refused, the plans before it are those of this step.
    """
    *others, last = attentions
    begun_ns, step, lengths = last._check_step(batch, **tensors)
    for each in others:
        if each.device != last.device:
            raise ValueError(f"all plans must be on {last.device}, got {each.device}")
    plans = [each._update_plan(batch, step) for each in others]
    plans.append(last._update_plan(batch, step, lengths))
    last._count_step(begun_ns)
    return plans


def default_workers(kernels: LoadedKernels | None, num_kv_heads: int) -> int:
    """Return the number of CTAs that the device runs at once for each KV head."""
    if kernels is None:
        return _TORCH_WORKERS
    return max(1, kernels.num_ctas // num_kv_heads)


def paths_key(paths: PrefixPaths) -> Hashable:
    """Return a key that is equal for equal paths."""
    return tuple(
        array.tobytes() for array in (paths.path_begin, paths.node_id, paths.kv_begin, paths.kv_end)
    )

"""The cost model of time: computes how long a prefill pass and a decode step take.

The constants of decode steps were fitted to recorded servers on an H100 and an H200
(`benchmarks/results`): an 8B model, and one GPU's part of a 70B model on eight GPUs. Tests compare
the estimates with these recordings. The constants of prefill passes were fitted to whole jobs on an
H200. For other GPUs, the constants are scaled by data sheets; no run has checked this scaling.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from sglang_pat.model_config import has_float8_cache, positive, quantisation_of
from sglang_pat.model_layers import (
    CHUNK,
    FULL,
    LATENT,
    NO_ATTENTION,
    STATE,
    WINDOW,
    Layer,
    check_ranks,
    read_layers,
)
from sglang_pat.support import (
    MAX_LATENT_GROUP_SIZE,
    WINDOW_SLACK,
    WINDOW_SLACK_PART,
    Unsupported,
    has_kernels,
    head_dim_name,
)
from sglang_pat.workload.models import GPUS, GpuModel, served_dtype
from sglang_pat.workload.weights import (
    WHOLE_BYTES,
    WeightBytes,
    Weights,
    read_weights,
    weight_bytes,
)

# Rates that were reached on an H100, as fractions of its peak rates.
_H100 = GPUS["H100"]
_KV_SHARE = 2.91e12 / _H100.bytes_per_second  # KV from memory
_PARTIAL_SHARE = 2.27e12 / _H100.bytes_per_second  # partial results, written and read
_WEIGHT_SHARE = 2.96e12 / _H100.bytes_per_second
_FLOPS_SHARE = 700e12 / _H100.flops_per_second
_L2_PER_SM = 6.8e12 / _H100.num_sms  # bytes of KV per second from the L2 cache
# The tensor cores multiply each KV token with a whole tile of 64 query rows, even if few of these
# are used. _LATENT_FLOPS_SHARE, the tensor cores' rate, was fitted to latent attention. This rate
# limits other kinds of attention only on GPUs with much bandwidth and few operations per second
# (H20).
_LATENT_FLOPS_SHARE = 650e12 / _H100.flops_per_second
# The tensor cores' rate in pat's non-latent attention, on tokens that several requests share. Each
# of these tokens is multiplied with all rows of a tile.
_TILE_FLOPS_SHARE = 400e12 / _H100.flops_per_second
_TILE_ROWS = 64
_OVERLAP = 4  # p of the p-norm that combines memory time and tensor-core time
_ATTENTION_SECONDS = 8.5e-6  # fixed time of a layer's attention
_LAYER_SECONDS = 32e-6  # a layer's norms, and the launches of its kernels
# Additional time of a layer with experts, with latent attention, or with a state: that of the
# kernels that choose and sort experts, project latent attention, or update the state.
_EXPERTS_SECONDS, _LATENT_SECONDS, _STATE_SECONDS = 35e-6, 70e-6, 40e-6
_PREFILL_SHARE = 650 / 989  # fraction of the tensor cores' peak
_PREFILL_ATTENTION_SHARE = 350 / 989
_PREFILL_SECONDS = 0.002  # fixed time of a pass
_PREFILL_LAYER_SECONDS = 0.3e-3  # least time of a layer, which runs without a CUDA graph
_PREFILL_REQUEST_SECONDS = 0.001  # fixed time of a request in a pass

_MEMORY_SHARE = 0.86  # fraction of a GPU's memory for weights and KV, about SGLang's default


class _Collective(NamedTuple):
    """The time of a collective of several GPUs: a fixed time, and that of the bytes of each GPU."""

    seconds: float
    bytes_per_second: float


# All-reduces, of which every layer has two, after attention and after the MLP. Both kinds were
# fitted to a 70B model on eight H200s.
_ALL_REDUCE = _Collective(5e-6, 300e9)  # SGLang's own
_NCCL = _Collective(18.5e-6, 210e9)

_PARTIAL_BYTES, _LSE_BYTES = 2, 4  # of each number in a partial output, and of the LSE
_STATE_BYTES_PER_REQUEST = 4 << 20  # read and written per step for a layer's state


class Reads(NamedTuple):
    """KV that the attention of one layer reads in a step, in tokens of one KV head.

    once: the distinct tokens, read from memory. again: repeated reads from memory by other requests
    of the batch. cached: repeated reads from the L2 cache. partials: number of partials per query
    head. cache_speed: the speed of reads from the cache, as a fraction of the speed at which all
    SMs together read. in_tiles: tokens that pat's tiles read for several requests at once. While
    the tensor cores multiply these tokens, the cache is read, so its reads take no additional time.
    by_fa3: whether the kernel is FA3's.
    """

    once: float
    again: float = 0.0
    cached: float = 0.0
    partials: float = 0.0
    cache_speed: float = 1.0
    in_tiles: float = 0.0
    by_fa3: bool = False

    @property
    def tokens(self) -> float:
        return self.once + self.again + self.cached

    def in_windows(self, requests: int, kv_tokens: float, window: float) -> Reads:
        """Return the part of these reads within the last `window` tokens of each request.

        Assumes that all requests have the same length and share one prefix, and that the part of
        the prefix within the windows fits into the L2 cache. kv_tokens: KV tokens of all requests
        together.
        """
        if kv_tokens <= requests * window:
            return self
        common = kv_tokens - self.once  # repeated reads of shared tokens
        prefix = common / max(requests - 1, 1)
        own = kv_tokens / requests - prefix
        left = max(0.0, window - own)
        part = (self.again + self.cached) / common if common else 1.0  # 1 if nothing is shared
        slack = min(WINDOW_SLACK, window * WINDOW_SLACK_PART, left) * (1 - part)
        cached = left * (requests - 1) * part + slack * requests
        return self._replace(
            once=left + requests * min(own, window),
            again=0.0,
            cached=cached,
            partials=self.partials if left else 0.0,
            in_tiles=left + cached if self.in_tiles else 0.0,
        )


class StepSeconds(NamedTuple):
    """The seconds of a decode step, and of its attention."""

    all: float
    attention: float


@dataclass(frozen=True)
class StepTime:
    """Computes the time of steps of one model on `tp` GPUs.

    With data-parallel attention, `dp` groups of GPUs have requests of their own. All arguments and
    results are those of one group; the others are assumed to do the same at the same time.

    Attributes
    ----------
    layers
        All layers of the model.
    bytes_of_weights
        Bytes of one parameter.
    kv_bytes
        Bytes of one number in the KV cache.
    quantisation
        Name of the checkpoint's quantisation; empty if there is none.
    """

    layers: Sequence[Layer]
    weights: Weights
    hidden_size: int
    gpu: GpuModel
    tp: int = 1
    dp: int = 1
    bytes_of_weights: WeightBytes = field(default_factory=WeightBytes)
    kv_bytes: float = 2.0
    quantisation: str = ""

    @classmethod
    def of_model(
        cls,
        config: Mapping[str, Any],
        gpu: GpuModel,
        tp: int = 1,
        layers: Sequence[Layer] | None = None,
        weights: Weights | None = None,
        kv_cache_dtype: str = "auto",
        dp: int = 1,
    ) -> StepTime:
        """Return the StepTime of the model that a `config.json` describes.

        Parameters
        ----------
        layers, weights
            None: derived from `config` by the rules of this package.
        kv_cache_dtype
            SGLang's option, one of `support.KV_CACHE_DTYPES`.

        Raises
        ------
        ValueError
            `tp` or a key of the configuration is not valid. The message names the key.
        """
        dtype, stored = served_dtype(config), quantisation_of(config)
        layers = read_layers(config, max(1, tp // dp)) if layers is None else layers
        if kv_cache_dtype == "auto":
            is_float8 = has_float8_cache(config)
        else:
            is_float8 = kv_cache_dtype.startswith("fp8")
        kv_bytes = 1.0 if is_float8 else 2.0
        layers = [_on_gpu(layer, gpu, one_byte=kv_bytes < 2) for layer in layers]
        if kv_cache_dtype.startswith("bf") and dtype != "bfloat16":
            mixed = Unsupported("dtype of queries and KV cache", f"{dtype} and bfloat16")
            layers = [
                replace(each, refusal=each.refusal or mixed) if each.num_qo_heads else each
                for each in layers
            ]
        check_ranks(layers, tp // dp)
        return cls(
            layers=layers,
            weights=read_weights(config, layers) if weights is None else weights,
            hidden_size=positive(config, "hidden_size"),
            gpu=gpu,
            tp=tp,
            dp=dp,
            bytes_of_weights=weight_bytes(config),
            kv_bytes=kv_bytes,
            quantisation=str(stored.get("quant_method") or stored.get("quant_algo") or ""),
        )

    @property
    def group(self) -> int:
        """Return how many GPUs attend for the same requests."""
        return self.tp // self.dp

    def kv_heads(self, layer: Layer) -> int:
        """Return how many KV heads one GPU has: at least 1, as GPUs may hold the same head."""
        return max(1, layer.num_kv_heads // self.group)

    @property
    def kv_bytes_per_token(self) -> float:
        """Return the KV bytes of a token on one GPU, over all layers."""
        return sum(self._token_bytes(layer) * self.kv_heads(layer) for layer in self.layers)

    @property
    def held_weight_bytes(self) -> float:
        """Return the bytes of the weights on one GPU."""
        weights, size = self.weights, self.bytes_of_weights
        shared = weights.experts * size.experts + weights.embedding * WHOLE_BYTES
        return self._dense_bytes + shared / self.tp

    def pool_tokens(self, pool_bytes: float | None = None) -> int:
        """Return how many tokens fit into a GPU's KV pool of `pool_bytes`.

        pool_bytes: None stands for the memory that the weights leave. ValueError if they leave
        none, or if fewer than two tokens fit.
        """
        gpu = self.gpu
        if pool_bytes is None:
            pool_bytes = gpu.memory_bytes * _MEMORY_SHARE - self.held_weight_bytes
            if pool_bytes <= 0:
                size = " at 2 bytes a parameter" * (self.bytes_of_weights == WeightBytes())
                raise ValueError(
                    f"the weights take {self.held_weight_bytes / 1e9:,.0f} GB{size} on each of "
                    f"{self.tp} {gpu.name} with {gpu.memory_bytes / 1e9:,.0f} GB: raise --tp"
                )
        tokens = int(pool_bytes / max(self.kv_bytes_per_token, 1))
        if tokens < 2:
            raise ValueError(f"a KV pool of {pool_bytes / 1e9:g} GB holds less than two tokens")
        return tokens

    def without_attention(self, batch: int) -> float:
        """Return the seconds of a decode step without its attention."""
        weights, gpu = self.weights, self.gpu
        tokens = batch * self.dp  # of all groups
        untouched = (1 - weights.experts_per_token / weights.num_experts) ** tokens
        experts = weights.experts * (1 - untouched) * self.bytes_of_weights.experts
        read = self._dense_bytes + experts / self.tp
        from_memory = read / gpu.bytes_per_second / _WEIGHT_SHARE
        flops = 2 * tokens * self._active / self.tp
        computed = flops / gpu.flops_per_second / _FLOPS_SHARE
        moved = self._states * batch * _STATE_BYTES_PER_REQUEST / self.group
        fixed = len(self.layers) * (_LAYER_SECONDS + self._collectives(batch))
        fixed += len(self.layers) * _EXPERTS_SECONDS * (weights.experts > 0)
        fixed += self._states * _STATE_SECONDS + self._latent * _LATENT_SECONDS
        return fixed + math.hypot(from_memory, computed) + moved / gpu.bytes_per_second

    def busy_sms(self, requests: int) -> float:
        """Return the fraction of the SMs that query-centric attention keeps busy.

        A CTA reads the KV of one request and one KV head. If there are fewer CTAs than SMs, each
        CTA is split into n parts, with the largest n for which every part has its own SM. If there
        are more CTAs than SMs, they run in waves, and in the last wave some SMs are idle.
        """
        heads = max(
            (self.kv_heads(layer) for layer in self.layers if layer.kind == FULL), default=0
        )
        blocks, sms = requests * heads, self.gpu.num_sms
        if not blocks:
            return 1.0
        if blocks < sms:
            return blocks * (sms // blocks) / sms
        turns = blocks / sms
        return turns / math.ceil(turns)

    def attention(self, layer: Layer, reads: Reads) -> float:
        """Return the seconds of one layer's attention."""
        gpu, heads = self.gpu, self.kv_heads(layer)
        per_token = self._token_bytes(layer) * heads
        if reads.by_fa3 and layer.kind != LATENT:
            per_token *= 2 / self.kv_bytes  # over fp8 KV, FA3 takes as long as over 16-bit KV
        memory = (reads.once + reads.again) * per_token / gpu.bytes_per_second / _KV_SHARE
        row_bytes = layer.v_head_dim * _PARTIAL_BYTES + _LSE_BYTES
        partial_bytes = 2 * reads.partials * layer.num_qo_heads / self.group * row_bytes
        merge = partial_bytes / gpu.bytes_per_second / _PARTIAL_SHARE
        row_flops = 2 * (layer.head_dim + layer.v_head_dim) / gpu.flops_per_second
        if layer.kind == LATENT:
            tiles = math.ceil(layer.num_qo_heads / self.group / MAX_LATENT_GROUP_SIZE)
            rows = tiles * MAX_LATENT_GROUP_SIZE
            computed = reads.tokens * rows * row_flops / _LATENT_FLOPS_SHARE
            return _ATTENTION_SECONDS + math.hypot(memory, computed) + merge
        cached = reads.cached * per_token / gpu.num_sms / _L2_PER_SM / reads.cache_speed
        seconds = memory + cached
        if reads.in_tiles:
            computed = reads.in_tiles * _TILE_ROWS * heads * row_flops / _TILE_FLOPS_SHARE
            seconds = (memory**_OVERLAP + computed**_OVERLAP) ** (1 / _OVERLAP)
        if gpu.capability[0] == 9:  # on Hopper, FA3 multiplies whole tiles, too (wgmma)
            least = reads.tokens * _TILE_ROWS * heads * row_flops / _LATENT_FLOPS_SHARE
            seconds = max(seconds, least)
        return _ATTENTION_SECONDS + seconds + merge

    def decode(self, requests: int, kv_tokens: float, ours: Reads, other: Reads) -> StepSeconds:
        """Return the times of a decode step.

        Parameters
        ----------
        kv_tokens
            KV tokens of all requests.
        ours, other
            The reads of a layer with full attention, `ours` if pat accelerates it, else `other`.
        """
        attention = 0.0
        for layer, count in self._alike.items():
            reads = ours if layer.is_accelerated else other
            if layer.kind == WINDOW and layer.window:
                reads = reads.in_windows(requests, kv_tokens, layer.window)
            elif layer.kind == CHUNK and layer.window:
                attended = (kv_tokens / max(requests, 1) - 1) % layer.window + 1
                reads = reads.in_windows(requests, kv_tokens, attended)
            elif layer.kind not in (FULL, LATENT):
                reads = Reads(kv_tokens)
            attention += count * self.attention(layer, reads)
        return StepSeconds(self.without_attention(requests) + attention, attention)

    def prefill(self, new: int, pairs: float, requests: int) -> float:
        """Return the seconds of a prefill pass that computes `new` tokens.

        Parameters
        ----------
        pairs
            Number of pairs of a new token and a token that it attends to, over all requests.
        """
        gpu, weights = self.gpu, self.weights
        matrices = 2 * new * (self._active - weights.vocabulary)
        attention = (
            4
            * pairs
            * sum(
                layer.num_qo_heads * (layer.head_dim + layer.v_head_dim) / 2
                for layer in self.layers
            )
        )
        seconds = matrices / _PREFILL_SHARE + attention / _PREFILL_ATTENTION_SHARE
        computed = seconds / self.group / gpu.flops_per_second  # each group prefills
        read = self.held_weight_bytes / gpu.bytes_per_second / _WEIGHT_SHARE
        launched = len(self.layers) * _PREFILL_LAYER_SECONDS
        longest = max(read, computed, launched)
        return _PREFILL_SECONDS + longest + requests * _PREFILL_REQUEST_SECONDS

    @cached_property
    def _alike(self) -> Counter[Layer]:
        """Return each layer with attention, without its index, and how often it occurs."""
        layers = (layer for layer in self.layers if layer.kind not in (STATE, NO_ATTENTION))
        return Counter(replace(layer, index=0) for layer in layers)

    @cached_property
    def _states(self) -> int:
        """Count the layers that keep a state."""
        return sum(layer.kind == STATE for layer in self.layers)

    @cached_property
    def _latent(self) -> int:
        """Count the layers with latent attention."""
        return sum(layer.kind == LATENT for layer in self.layers)

    @cached_property
    def _active(self) -> float:
        """Return the number of parameters that one token is multiplied with."""
        weights = self.weights
        return weights.dense + weights.experts * weights.experts_per_token / weights.num_experts

    @property
    def _dense_bytes(self) -> float:
        """Return the bytes of `weights.dense` on one GPU. Its output head is unquantised."""
        weights, size = self.weights, self.bytes_of_weights
        mlps = weights.dense - weights.vocabulary - weights.attention
        shared = mlps * size.dense + weights.vocabulary * WHOLE_BYTES
        return weights.attention * size.attention / self.group + shared / self.tp

    def _token_bytes(self, layer: Layer) -> float:
        """Return the bytes that a token takes in one KV head of a layer."""
        return layer.kv_elements / max(layer.num_kv_heads, 1) * self.kv_bytes

    def _collectives(self, batch: int) -> float:
        """Return the seconds of the collectives of a layer.

        An all-reduce is a reduce-scatter and an all-gather. With data-parallel attention, SGLang
        calls NCCL for both, once within the group and once among all GPUs, around a layer's
        experts. Each is assumed to take half as long as NCCL's all-reduce.
        """
        each = _ALL_REDUCE if self.dp == 1 else _NCCL
        seconds = 0.0
        for gpus, tokens in ((self.group, batch), (self.tp, batch * self.dp)):
            moved = 2 * (gpus - 1) / gpus * tokens * self.hidden_size * 2
            seconds += (gpus > 1) * (each.seconds + moved / each.bytes_per_second)
        return seconds


def _on_gpu(layer: Layer, gpu: GpuModel, *, one_byte: bool) -> Layer:
    """Return the layer, with a refusal if pat has no kernels for it on this type of GPU.

    one_byte: the KV cache is fp8.
    """
    head_dims = layer.head_dim, layer.v_head_dim
    if not layer.is_accelerated or has_kernels(*head_dims, gpu.capability, one_byte=one_byte):
        return layer
    if layer.kind == LATENT:
        refusal = Unsupported("attention", f"latent attention on a {gpu.name}")
    else:
        over = " over an fp8 KV cache" * one_byte
        refusal = Unsupported("head_dim", f"{head_dim_name(*head_dims)}{over} on a {gpu.name}")
    return replace(layer, refusal=refusal)

"""Types of the C++ module in kernels/bindings.cpp."""

from enum import Enum

NUM_LAUNCH_FACTS: int

class SinkType(Enum):
    """Element type of attention sinks."""

    FLOAT32 = ...
    BFLOAT16 = ...
    FLOAT16 = ...

class GatherArgument:
    """The argument of gather_slots_kernel."""

    def __init__(self) -> None: ...
    @property
    def address(self) -> int: ...
    def set(
        self,
        plan: int,
        capacity: list[int],
        shared_slots: int,
        req_to_token: int,
        req_to_token_stride: int,
        req_pool_indices: int,
        rows_are_int64: bool,
        /,
    ) -> None: ...

class FillArgument:
    """The argument of fill_rows_kernel."""

    def __init__(self) -> None: ...
    @property
    def address(self) -> int: ...
    def set(
        self,
        cuts: int,
        req_to_token: int,
        req_to_token_stride: int,
        table_width: int,
        req_pool_indices: int,
        rows_are_int64: bool,
        seq_lens: int,
        lengths_are_int64: bool,
        slot_map: int,
        map_is_int64: bool,
        num_requests: int,
        window: int,
        chunked: bool,
        rows: int,
        row_lens: int,
        /,
    ) -> None: ...

class DecodeArgument:
    """The argument of pack_decode_kernel and merge_partials_kernel."""

    def __init__(self) -> None: ...
    @property
    def address(self) -> int: ...
    def set_buffers(
        self,
        plan: int,
        capacity: list[int],
        shared_slots: int,
        partial_out: int,
        partial_lse: int,
        /,
    ) -> None: ...
    def set_step(
        self,
        req_to_token: int,
        req_to_token_stride: int,
        table_width: int,
        req_pool_indices: int,
        rows_are_int64: bool,
        seq_lens: int,
        lengths_are_int64: bool,
        /,
    ) -> None: ...
    def set_launch(self, counters: int, counter: int, max_merges: int, /) -> None: ...
    def set_maps(self, keys: int, values: int, /) -> None: ...
    def set_queries(
        self,
        q: int,
        row_chunks: int,
        head_chunks: int,
        rope: int,
        rope_row_chunks: int,
        rope_head_chunks: int,
        /,
    ) -> None: ...
    def set_layer(
        self,
        num_requests: int,
        num_q_heads: int,
        num_kv_heads: int,
        k_cache: int,
        k_slot_bytes: int,
        v_cache: int,
        v_slot_bytes: int,
        out: int,
        out_lse: int,
        sm_scale: float,
        logit_cap: float,
        k_scale: float,
        v_scale: float,
        k_scale_on_device: int,
        v_scale_on_device: int,
        sinks: int,
        sink_type: SinkType,
        /,
    ) -> None: ...

class ScaleUse(Enum):
    """Says how new keys or values are scaled: not at all, by a factor or by a divisor."""

    NONE = ...
    MULTIPLY = ...
    DIVIDE = ...

class WriteArgument:
    """The argument of write_kv_kernel."""

    def __init__(self) -> None: ...
    @property
    def address(self) -> int: ...
    def set_keys(
        self,
        source: int,
        token_stride: int,
        head_stride: int,
        cache: int,
        slot_bytes: int,
        scale: int,
        scale_use: ScaleUse,
        /,
    ) -> None: ...
    def set_values(
        self,
        source: int,
        token_stride: int,
        head_stride: int,
        cache: int,
        slot_bytes: int,
        scale: int,
        scale_use: ScaleUse,
        /,
    ) -> None: ...
    def set_slots(
        self, slots: int, slots_are_int64: bool, num_kv_heads: int, num_slots: int, overflow: int, /
    ) -> None: ...

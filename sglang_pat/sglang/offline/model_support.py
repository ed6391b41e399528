"""The routes of a model that is not served: from its configuration, without weights or a GPU.

Builds the model's class on torch's meta device, as one rank with default options. What only a
running server shows is not known: the KV pool, arguments that the model passes in its first step.
"""

from __future__ import annotations

import atexit
import tempfile
from pathlib import Path
from typing import Any

import torch

from sglang_pat.sglang import compat
from sglang_pat.sglang.start.layer_support import Routes, model_reason, shape_reason, window_reason
from sglang_pat.sglang.start.server_options import Reason, attention_backends, server_reason
from sglang_pat.support import BACKEND, DEFAULT_BACKENDS


def routes_of_model(path: str) -> Routes:
    """The routes that a server would choose here with default options.

    Parameters
    ----------
    path
        A folder, or a name that SGLang can load the configuration of.

    Raises
    ------
    Exception
        Whatever SGLang raises for a model that it cannot build in this process.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    arguments = ServerArgs(
        model_path=path,
        attention_backend=BACKEND,
        load_format="dummy",
        skip_tokenizer_init=True,
        disable_radix_cache=True,  # some of its kinds want a GPU
    )
    compat.resolve_arguments(arguments)
    config = ModelConfig.from_server_args(arguments)
    prefill, default = attention_backends(arguments)
    whole = server_reason(arguments) or model_reason(config)
    if whole is None and default not in DEFAULT_BACKENDS:
        whole = Reason("default backend", default)
    _become_a_rank(arguments, config)
    model = _on_meta_device(config)
    whole = whole or window_reason(model)
    chunk_size = getattr(config, "attention_chunk_size", None)
    routes = Routes.of_model(model, default, whole, lambda layer: shape_reason(layer, chunk_size))
    routes.prefill = prefill
    return routes


def _become_a_rank(arguments: Any, config: Any) -> None:
    """Set up what a model asks for while it is built: the only rank, which talks to nobody."""
    compat.publish_only_rank(arguments, before_dp=_init_distributed, config=config)


def _init_distributed() -> None:
    from sglang.srt import distributed

    if torch.distributed.is_initialized():
        return
    folder = tempfile.TemporaryDirectory(prefix="sglang-pat-")
    atexit.register(folder.cleanup)
    distributed.init_distributed_environment(
        backend="gloo",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{Path(folder.name) / 'meeting'}",
    )
    distributed.initialize_model_parallel()


def _on_meta_device(config: Any) -> torch.nn.Module:
    from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype

    model_class, _ = get_model_architecture(config)
    with set_default_torch_dtype(config.dtype), torch.device("meta"):
        model: torch.nn.Module = model_class(config=config.hf_config, quant_config=None)
    return model

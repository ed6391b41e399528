"""Options of the commands that start SGLang's server with pat and with another backend.

`bench` and `check` share these options. A combination that makes a comparison invalid is refused
before a server starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pat.bench.stand_ins import refuse_stand_ins
from sglang_pat.cli.arguments import FLAGS, whole_number
from sglang_pat.cli.gpus import Gpu, find_gpus
from sglang_pat.messages import quoted
from sglang_pat.offline.launch_flags import PLUGIN_GROUP, attention_backends, launch_flags
from sglang_pat.output_file import output_or_stdout

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT = "default"
GPU_ARGUMENTS = {"cuda_graph_backend_prefill": "disabled"}  # halves the time to start a server
CPU_ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,
    "mem_fraction_static": 0.95,
}
_PACKAGES = ("sglang-pat", "sglang", "torch", "flashinfer-python", "sglang-kernel")
# Plug-ins that register no attention backend besides pat. The last two are part of SGLang.
_PLUGINS_WITHOUT_OTHERS = {"pat", "smg-servicer", "smg-zmq"}
_OWN_FLAGS = (
    *("--attention-backend", "--decode-attention-backend", "--model-path", "--model", "--device"),
    *("--host", "--port", "--help"),
)


_TP = ("--tp", "--tp-size", "--tensor-parallel-size")
_MOST_GPUS = 4096
_BACKEND_OPTION = "--against names the other backend"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add --against, --device, --server-args and --json to `parser`."""
    parser.add_argument(
        "--against",
        default=DEFAULT,
        metavar="BACKEND",
        help="a backend of SGLang (default: the one that SGLang chooses)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: only to see that it works, with a tiny model (default: cuda)",
    )
    add_tp(parser, "GPUs that share the model (default: 1)")
    parser.add_argument(
        FLAGS,
        default="",
        metavar="ARGS",
        help="more arguments of the server, as one text: '--kv-cache-dtype bfloat16'",
    )
    parser.add_argument(
        "--json",
        type=output_or_stdout,
        metavar="FILE",
        help="everything, as JSON; -: to stdout, and all else to stderr",
    )


def add_tp(parser: argparse.ArgumentParser, help: str) -> None:
    """Add --tp to `parser`."""
    parser.add_argument("--tp", type=whole_number(1, _MOST_GPUS), metavar="N", help=help)


def check_server_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError for options that servers refuse or that make the comparison invalid."""
    if importlib.util.find_spec("sglang") is None:
        raise ValueError("SGLang is not installed beside this package; run `sglang-pat doctor`")
    check_backend("--against", arguments.against)
    check_flags(server_flags(arguments))
    refuse_stand_ins()


def check_backend(option: str, name: str) -> None:
    """Raise ValueError if `name` is pat, or if no backend has this name.

    If an unknown plug-in is installed, all other names are allowed: the plug-in may add backends.
    """
    if name == "pat":
        raise ValueError(f"{option} pat; allowed: another backend of SGLang, or {DEFAULT}")
    known = {DEFAULT, *attention_backends()}
    plugins = {plugin.name for plugin in entry_points(group=PLUGIN_GROUP)}
    may_be_more = not plugins <= _PLUGINS_WITHOUT_OTHERS or known == {DEFAULT}
    if name not in known and not may_be_more:
        raise ValueError(f"{option} {name!r}; allowed: {', '.join(sorted(known))}")


def usable_gpus(arguments: argparse.Namespace) -> list[Gpu]:
    """Return the GPUs of this machine. ValueError if there are fewer than --device or --tp need."""
    gpus = find_gpus()
    if arguments.device == "cuda" and not gpus:
        raise ValueError("no NVIDIA GPU that the driver reports; `sglang-pat doctor` says more")
    if gpus and (arguments.tp or 1) > len(gpus) and "--nnodes" not in arguments.server_args:
        raise ValueError(
            f"--tp {arguments.tp}; allowed: up to the {len(gpus)} GPUs of this machine"
        )
    return gpus


def check_flags(words: Sequence[str], backend: str = _BACKEND_OPTION) -> None:
    """Raise ValueError for flags that SGLang does not know or that the command itself sets.

    backend: the end of the error message if a flag chooses an attention backend.
    """
    if words and not words[0].startswith("-"):
        raise ValueError(
            f"--server-args: {quoted(words[0])} is not a flag; allowed: flags of SGLang"
        )
    known = launch_flags()
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        # SGLang accepts abbreviations, so `flag` may be only the beginning of a flag.
        own = next((own for own in _OWN_FLAGS if own.startswith(flag)), None)
        if own is not None and (flag == own or flag not in known):
            instead = backend if "backend" in own else "it is set here"
            raise ValueError(f"--server-args must not contain {flag}; {instead}")
        name = flag.replace("--no-", "--", 1)
        if known and not any(each.startswith((flag, name)) for each in known):
            raise ValueError(f"--server-args: {quoted(flag)} is not a flag of the installed SGLang")
    for word, following in pairwise([*words, ""]):
        flag, _, value = word.partition("=")
        file = value or following
        if flag == "--config" and not Path(file).is_file():
            raise ValueError(f"--server-args: --config {quoted(file)}: there is no such file")


def server_flags(arguments: argparse.Namespace) -> list[str]:
    """Return --tp and the words of --server-args.

    Raises ValueError if --server-args has an unclosed quotation or repeats --tp.
    """
    given, tp = arguments.server_args or "", arguments.tp
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise ValueError(f"{FLAGS} {quoted(given)}: {error}; allowed: as in a shell") from None
    if tp is None:
        return words
    twice = next((word for word in words if word.partition("=")[0] in _TP), None)
    if twice is not None:
        raise ValueError(f"--tp {tp} and {twice} in {FLAGS}; allowed: one of them")
    return ["--tp", str(tp), *words]


def backend_name(asked: str, info: dict[str, Any]) -> str:
    """Return the name of the decode backend. If `asked` is `default`, that is SGLang's choice."""
    chosen = info.get("decode_attention_backend") or info.get("attention_backend")
    return asked if asked != DEFAULT or not chosen else f"{chosen} (SGLang's default)"


def new_console() -> Console:
    """Return a console that highlights nothing."""
    from rich.console import Console

    return Console(highlight=False)


def run_metadata(arguments: argparse.Namespace, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return what results depend on. The version of a package that is not installed is None."""
    return {
        "command": shlex.join(["sglang-pat", *sys.argv[1:]]),
        "gpus": [{"name": gpu.name, "driver": gpu.driver} for gpu in gpus],
        "versions": {package: _version(package) for package in _PACKAGES},
        "model": str(arguments.model),
        "server_args": shlex.join(server_flags(arguments)),
        "device": arguments.device,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""KernelConfig: one compiled variant of the kernels, and its compiler options.

Read by `kernel_loader.py`, which compiles it. Nothing here touches a GPU or a compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_pat import support

# dtype -> CUDA type, torch scalar type, short name
_ELEMENTS = {
    torch.float16: ("__half", "Half", "fp16"),
    torch.bfloat16: ("__nv_bfloat16", "BFloat16", "bf16"),
}
# Architectures whose own instructions (wgmma, setmaxnreg) need the target with an "a".
_SPECIFIC_ARCHS = ((9, 0), (10, 0), (10, 3))


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """dtype: of queries and KV, float16 or bfloat16. head_dim: 64 or 128. arch: compute capability.

    ValueError, naming the value and what is supported, for anything else.
    """

    dtype: torch.dtype
    head_dim: int
    arch: tuple[int, int]

    def __post_init__(self) -> None:
        if self.dtype not in _ELEMENTS:
            allowed = ", ".join(str(dtype) for dtype in _ELEMENTS)
            raise ValueError(f"the CUDA kernels support dtype {allowed}; got {self.dtype}")
        if self.head_dim not in support.HEAD_DIMS:
            raise support.unsupported("head_dim", self.head_dim)
        if self.arch < support.OLDEST_CAPABILITY:
            raise ValueError(
                "the CUDA kernels need compute capability 8.0 (Ampere) or newer; "
                f"got {self.arch[0]}.{self.arch[1]}"
            )

    @classmethod
    def for_device(cls, dtype: torch.dtype, head_dim: int, device: torch.device) -> KernelConfig:
        """The variant that a CUDA device runs."""
        return cls(dtype, head_dim, torch.cuda.get_device_capability(device))

    @property
    def name(self) -> str:
        """Short name, usable in identifiers and file names: `bf16_d128_sm90`."""
        return f"{_ELEMENTS[self.dtype][2]}_d{self.head_dim}_sm{self._arch_number}"

    @property
    def namespace(self) -> str:
        """Namespace of the operators below `torch.ops`."""
        return f"sglang_pat_{self.name}"

    @property
    def defines(self) -> list[str]:
        """Preprocessor definitions, for both compilers."""
        cuda_type, scalar_type, _ = _ELEMENTS[self.dtype]
        return [
            f"-DPAT_ELEMENT={cuda_type}",
            f"-DPAT_SCALAR_TYPE={scalar_type}",
            f"-DPAT_HEAD_DIM={self.head_dim}",
            f"-DPAT_TARGET_ARCH={self._arch_number}",
            f"-DPAT_NAMESPACE={self.namespace}",
        ]

    @property
    def code_generation(self) -> str:
        """nvcc's -gencode value."""
        target = f"{self._arch_number}{'a' if self.arch in _SPECIFIC_ARCHS else ''}"
        return f"arch=compute_{target},code=sm_{target}"

    @property
    def _arch_number(self) -> int:
        return 10 * self.arch[0] + self.arch[1]


def parse_arch(text: str) -> tuple[int, int]:
    """`9.0` -> (9, 0). ValueError if it is no compute capability."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and len(minor) == 1 and minor.isdecimal()):
        raise ValueError(f"a compute capability looks like 9.0, got {text!r}")
    return int(major), int(minor)

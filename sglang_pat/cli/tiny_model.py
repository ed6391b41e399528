"""`sglang-pat demo --write-model`: write a small model, to try a server without a download."""

from __future__ import annotations

import shlex
import shutil
from contextlib import suppress
from pathlib import Path

from sglang_pat.cli.arguments import fail

TRAINED = Path(__file__).parent / "trained"


def write_model(folder: Path) -> int:
    """Write the whole model, or nothing. Return the exit status: 0, or 2 if nothing is written."""
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            return fail("demo", f"{str(folder)!r} is not empty; allowed: a new or an empty folder")
    except OSError as error:
        return fail("demo", f"{str(folder)!r}: {error.strerror}")
    files = [*TRAINED.iterdir()]
    try:
        for file in files:
            shutil.copyfile(file, folder / file.name)
    except BaseException as error:
        with suppress(OSError):
            for file in files:
                (folder / file.name).unlink(missing_ok=True)
            if is_new:
                folder.rmdir()
        if not isinstance(error, OSError):
            raise
        return fail("demo", f"{str(folder)!r}: {error.strerror}")
    model = shlex.quote(str(folder))
    print(f"{folder} has a tiny Llama, which continues docstrings of Python. To serve it:")
    print(f"python -m sglang_pat.sglang.cpu --model-path {model} --attention-backend pat")
    return 0

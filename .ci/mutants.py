"""Mutants: mistakes in the code, one at a time, each of which the tests must notice.

`mutants.toml` lists them. `make mutants` makes each one in a copy of the tree, runs the tests that
it names there, and fails if they pass.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sglang_pat.cli.arguments import Parser

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests/support/mutants.toml"
# It stays between runs, so that a mutant of the scheduler compiles one file.
COPY = ROOT / "build/mutants"
CPP_TESTS = "make test-cpp"
SECONDS = 900  # of the tests of one mutant: what takes longer hangs
CANNOT_RUN = (4, 5)  # exit status of pytest: no such test
FAILURES = ("FAILED ", "ERROR ", "SUMMARY: ", "exit status ")  # how lines begin that name one


@dataclass(frozen=True, slots=True)
class Mutant:
    """One line of code that is wrong.

    Attributes
    ----------
    why
        What goes wrong, for a user or a caller.
    file, old, new
        `old` is in the file, once; the mutant has `new` instead.
    tests
        Targets of pytest, or `CPP_TESTS`. One of them fails.
    survives
        Why no test fails. Empty: one does.
    """

    why: str
    file: str
    old: str
    new: str
    tests: list[str]
    survives: str = ""

    def of(self, text: str) -> str:
        """The mutant of a file's text. ValueError if `old` is not in it exactly once."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(
                f"{self.file}: {self.old.strip()!r} is there {text.count(self.old)} times; "
                "a mutant replaces a text that is there once"
            )
        return text.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """All that are listed."""
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text())["mutant"]]


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "words", nargs="*", help="only mutants with one of these in their file or description"
    )
    words = parser.parse_args().words
    chosen = [m for m in read_mutants() if not words or any(w in m.file + m.why for w in words)]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(words)} in its file or description")
    update_copy()
    try:
        for mutant in chosen:
            mutant.of((COPY / mutant.file).read_text())
    except ValueError as error:
        parser.error(str(error))
    print(f"{len(chosen)} mutants; first the tests without one", flush=True)
    failure = failing(sorted({test for mutant in chosen for test in mutant.tests}))
    if failure is not None:
        print(f"the tests fail without a mutant: {failure}")
        return 1
    wrong = 0
    for mutant in chosen:
        begin = time.monotonic()
        with mutated(mutant):
            failure = failing(mutant.tests)
        found = "killed" if failure else "survived"
        expected = "survived" if mutant.survives else "killed"
        mark = " " if found == expected else "!"
        wrong += found != expected
        print(
            f"{mark} {found:8}  {mutant.file}: {mutant.why} "
            f"({failure or mutant.survives or 'all tests pass'}; {time.monotonic() - begin:.0f} s)",
            flush=True,
        )
    survivors = sum(bool(mutant.survives) for mutant in chosen)
    print(f"{len(chosen)} mutants, {survivors} of them known to survive, {wrong} not as listed")
    return 1 if wrong else 0


def update_copy() -> None:
    """Bring the copy to what is in the tree now, with an environment that holds its package."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for name in listed.stdout.split("\0"):
        source, target = ROOT / name, COPY / name
        if not source.is_file():  # deleted, or the end of the list
            continue
        if not target.exists() or not filecmp.cmp(source, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)  # without its time: what is made of it is made again
    environment = COPY / ".venv"
    if not environment.exists():
        make = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
        subprocess.run(make, check=True)
        (COPY / "build").mkdir(exist_ok=True)
        (COPY / "build/uv").symlink_to(ROOT / "build/uv")
    # It has the packages of this one, but its own sglang-pat.
    (packages,) = environment.glob("lib/python*/site-packages")
    others = sysconfig.get_path("purelib")
    (packages / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n")
    time_of_list = (COPY / "pyproject.toml").stat().st_mtime_ns
    for stamp in (".build-tools-installed", ".dependencies-installed"):
        (environment / stamp).touch()
        os.utime(environment / stamp, ns=(time_of_list, time_of_list))


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Within, the copy has the mutant."""
    path = COPY / mutant.file
    text = path.read_text()
    path.write_text(mutant.of(text))
    try:
        yield
    finally:
        path.write_text(text)


def failing(tests: list[str]) -> str | None:
    """Run tests in the copy. Returns what fails, in a line; None if all pass.

    Ends the run, with the output, if they cannot be run: a test is not there, the mutant does not
    compile.
    """
    for command in commands(tests):
        ran = run(command)
        if ran.returncode in CANNOT_RUN:
            sys.exit(f"{' '.join(command)} cannot be run:\n{ran.stdout}")
        if ran.returncode:
            lines = [*ran.stdout.splitlines(), f"exit status {ran.returncode}"]
            return next(x for x in lines if x.startswith(FAILURES)).split(" - ")[0]
    return None


def commands(tests: list[str]) -> Iterator[list[str]]:
    """Commands that run tests in the copy, each after building what it needs."""
    if CPP_TESTS in tests:
        build("build/cpp-tests/scheduler_tests")
        yield ["build/cpp-tests/scheduler_tests"]
        yield ["build/cpp-tests/scheduler_fuzz", "--plans", "300", "--operations", "10000"]
    targets = [test for test in tests if test != CPP_TESTS]
    if targets:
        build("setup")
        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
        yield [".venv/bin/python", "-m", "pytest", *options, *targets]


def build(target: str) -> None:
    """Make a target of the Makefile in the copy."""
    made = run(["make", "--no-print-directory", target])
    if made.returncode:
        sys.exit(f"make {target} fails:\n{made.stdout}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command in the copy, with its output. It is ended if it takes too long."""
    return subprocess.run(
        ["timeout", str(SECONDS), *command],
        cwd=COPY,
        env=os.environ | {"MAKEFLAGS": ""},  # of `make mutants`, with its ARGS
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())

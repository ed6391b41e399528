"""Check words: openings of docstrings, calques, and the share of long sentences in the docs.

Prints `file:line: what is wrong`; exits with 1 if there is anything. Standard library only.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPENING = re.compile(r"(Of|What|Whether|As|How|In which) ")
CALQUE = re.compile(
    r"\b(anew|likewise|tells why|(is|are) pat's|(?<!all )but for"
    r"|(leaves?|left|leaving) away|(brings?|brought) along)\b"
)
MAX_WORDS = 35
MAX_SHARE = 0.01  # of the sentences of README.md and docs/
HISTORY = "CHANGELOG.md"  # keeps its words

Prose = Iterator[tuple[int, str]]  # line, text


def python(text: str) -> Prose:
    """Comments and docstrings, those of constants too."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)


def markdown(text: str) -> Prose:
    """Paragraphs, list items and rows of tables, without code blocks, comments and addresses."""
    text = re.sub(r"(?ms)^ *```.*?^ *```|<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if lines and re.match(r"\s*([-*|#>]\s|\d+\. |\||$)", line):
            yield number - len(lines), " ".join(lines)
            lines = []
        if line.strip():
            lines.append(line.strip())


def c_comments(text: str) -> Prose:
    return ((i, line.partition("//")[2]) for i, line in enumerate(text.split("\n"), start=1))


READERS = {".py": python, ".pyi": python, ".md": markdown}
READERS |= dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), c_comments)


def main() -> int:
    found, long, count = [], [], 0
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        path = ROOT / name
        if path.suffix not in READERS or name == HISTORY or not path.exists():
            continue
        for line, text in READERS[path.suffix](path.read_text()):
            found += [f"{name}:{line}: calque: {m[0]}" for m in CALQUE.finditer(text)]
            if path.suffix.startswith(".py") and OPENING.match(text):
                found.append(f"{name}:{line}: a docstring opens with a noun or a verb: {text[:40]}")
            if name.startswith(("docs/", "README")) and text[0] not in "|#":
                sentences = re.split(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z`*\[(])", text)
                count += len(sentences)
                long += [f"{name}:{line}" for each in sentences if len(each.split()) > MAX_WORDS]
    if len(long) > MAX_SHARE * count:
        found.append(f"{len(long)} of {count} sentences have over {MAX_WORDS} words: {long}")
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

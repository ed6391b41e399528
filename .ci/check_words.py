"""Check words: openings of docstrings and comments, calques, long sentences of the docs.

Prints `file:line: what is wrong`; exits with 1 if there is anything. Standard library only.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPENING = re.compile(r"(Of|What|Whether|As|How|In which|Which) ")
CALQUE = re.compile(
    r"\b(anew|likewise|tells why|(is|are) pat's|(?<!all )but for"
    r"|(leaves?|left|leaving) away|(brings?|brought) along"
    r"|[Ss]o do(es)? (?!not)|told (so|of|next|from)|(is|are|be) told(?= ?[.:]))\b"
)
MAX_WORDS = 35
MAX_SHARE = 0.01  # of the sentences of README.md and docs/
KEPT = ("CHANGELOG.md", ".ci/check_words.py", "tests/unit/test_words.py")  # name what they refuse

Prose = Iterator[tuple[int, str]]  # line, text


def python(text: str) -> Prose:
    """Comments, docstrings (those of constants too) and other strings, which begin with a space."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (token for token in tokens if token.type == tokenize.COMMENT)
    yield from joined((*token.start, token.line, token.string.lstrip("#: ")) for token in comments)
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value if id(node) in docstrings else f" {node.value}"


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
    lines = enumerate(text.split("\n"), start=1)
    found = ((i, line.find("//"), line) for i, line in lines if "//" in line)
    return joined((i, column, line, line[column + 2 :].strip()) for i, column, line in found)


def joined(comments: Iterable[tuple[int, int, str, str]]) -> Prose:
    """Comments (line, column, its code, text) as one where each has a line of its own."""
    begin, block = 0, list[str]()
    for number, column, line, text in comments:
        if block and (number != begin + len(block) or line[:column].strip()):
            yield begin, " ".join(block)
            block = []
        begin = begin if block else number
        block.append(text)
    if block:
        yield begin, " ".join(block)


READERS = {".py": python, ".pyi": python, ".md": markdown}
READERS |= dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), c_comments)


def main() -> int:
    found, long, count = [], [], 0
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        path = ROOT / name
        if path.suffix not in READERS or name in KEPT or not path.exists():
            continue
        for line, text in READERS[path.suffix](path.read_text()):
            found += [f"{name}:{line}: calque: {m[0]}" for m in CALQUE.finditer(text)]
            if path.suffix != ".md" and OPENING.match(text):
                found.append(f"{name}:{line}: opens with no noun or verb: {text[:40]}")
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

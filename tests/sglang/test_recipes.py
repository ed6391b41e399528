"""SGLang has every option of the documentation's commands, and pat logs each quoted line."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from sglang.srt.server_args import ServerArgs

from sglang_pat import support
from sglang_pat.cli.main import build_parser
from sglang_pat.plan import HeadConfig
from sglang_pat.sglang.start.layer_support import LayerSupport
from sglang_pat.support import Unsupported

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
_SERVERS = r"(?:python3? -m sglang\.launch_server|sglang serve|python3? -m sglang_pat\.sglang\.cpu)"


def commands(text: str, program: str) -> list[str]:
    """Return the commands of a page's code blocks that run `program`, with lines joined."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("#")[0] for line in lines if re.search(program, line)]


def inline_code(text: str) -> list[str]:
    """Return inline code of sentences and tables, each on one line."""
    prose = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def our_parsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (each for each in build_parser()._actions if isinstance(each.choices, dict))
    parsers: dict[str, argparse.ArgumentParser] = dict(commands.choices or {})
    return parsers


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


def sglang_options() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {name: action for action in parser._actions for name in action.option_strings}


def flags(command: str) -> list[str]:
    return re.findall(r"(?<!\S)(--[a-z][\w-]*)", command)


LAUNCHES = [(page, line) for page, text in PAGES.items() for line in commands(text, _SERVERS)]


def test_pages_have_commands() -> None:
    found = {page for page, _ in LAUNCHES}
    assert {"README.md", "docs/guide.md", "docs/recipes.md", "docs/speculation.md"} <= found


@pytest.mark.parametrize(("page", "command"), LAUNCHES)
def test_sglang_has_every_option(page: str, command: str) -> None:
    assert set(flags(command)) <= set(sglang_options()), page


def log_lines(text: str) -> list[str]:
    """Return quoted log lines about decoded layers. Inline code may span two lines."""
    quoted = []
    for ticks, code in re.findall(r"(`+)([^`]+)\1", text):
        quoted += code.splitlines() if len(ticks) > 1 else [" ".join(code.split())]
    return [line for line in quoted if re.search(r"pat decodes \d", line)]


def as_logged(line: str) -> str:
    """Return the line that `LayerSupport` logs for the numbers and names of a quoted line."""
    draft = "draft model: " if line.startswith("draft model: ") else ""
    pat, total = map(int, re.findall(r"\d+", line)[:2])
    prefill = re.search(r"prefill on (\w+)", line)
    layer_support = LayerSupport(re.findall(r" on (\w+)", line)[0] if " on " in line else "")
    layer_support.prefill = prefill[1] if prefill else None if draft else "not named"
    layer_support.shapes = dict.fromkeys(range(pat), HeadConfig(32, 8, 128, 128))
    for layer_id in range(pat, total):
        reason = re.findall(r"; \d+ on \w+: ([^;]+)", line)[0]
        layer_support.fall_back(layer_id, Unsupported("attention", reason))
    return f"{draft}{layer_support}"


@pytest.mark.parametrize(
    ("page", "line"), [(page, line) for page, text in PAGES.items() for line in log_lines(text)]
)
def test_the_log_has_every_quoted_line(page: str, line: str) -> None:
    assert as_logged(line) == line, page


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_new_users_are_shown_the_line_that_says_that_it_works(page: str) -> None:
    assert log_lines(PAGES[page])


def test_drafts_of_deepseek_v3_fall_back_as_the_recipe_says() -> None:
    page = PAGES["docs/speculation.md"]
    (heads, most, fewer) = re.findall(
        r"at TP 8 has (\d+) heads a rank: .*usual (\d+) MTP draft tokens it falls back, with (\d+)",
        " ".join(page.split()),
    )[0]
    assert int(heads) == 128 // 8
    assert support.fills_tile(int(heads), int(most))
    assert not support.fills_tile(int(heads), int(fewer))


@pytest.mark.parametrize("prefix", ["--sglang-", "engine_kwargs.sglang."])
def test_trainers_hand_through_options_that_exist(prefix: str) -> None:
    page = PAGES["docs/recipes.md"]
    passed = re.findall(re.escape(prefix) + r"([a-z][\w-]*)[ =](\S+)", page)
    expected = {"attention_backend": "pat", "enable_deterministic_inference": "True"}
    destinations = {}
    for name, value in passed:
        option = sglang_options()["--" + name.replace("_", "-")]
        destinations[option.dest] = value
    assert destinations["attention_backend"] == "pat"
    assert destinations.items() <= expected.items()


def test_the_deployment_names_options_that_exist() -> None:
    folder = ROOT / "docs/operate/deploy"
    entry = re.findall(r"^ENTRYPOINT (.*)$", (folder / "Dockerfile").read_text(), re.MULTILINE)
    (worker, *_) = yaml.safe_load_all((folder / "kubernetes.yaml").read_text())
    arguments = worker["spec"]["template"]["spec"]["containers"][0]["args"]
    named = {*re.findall(r'"(--[\w-]+)"', entry[0]), *flags(" ".join(arguments))}
    assert {"--attention-backend", "--mem-fraction-static"} <= named
    assert named <= set(sglang_options())


_OURS = r"^\s*sglang-pat [a-z]"
OUR_COMMANDS = [
    (page, line)
    for page, text in PAGES.items()
    for line in (*commands(text, _OURS), *filter(re.compile(_OURS).match, inline_code(text)))
]


def test_pages_show_every_command_of_ours() -> None:
    assert {command.split()[1] for _, command in OUR_COMMANDS} == set(our_parsers())


@pytest.mark.parametrize(("page", "command"), OUR_COMMANDS)
def test_our_own_options_exist(page: str, command: str) -> None:
    given = shlex.split(command)
    allowed = options(our_parsers()[given[1]])
    if "--server-args" in given:
        of_sglang = given.pop(given.index("--server-args") + 1)
        assert set(flags(of_sglang)) <= set(sglang_options()), page
    assert {word.partition("=")[0] for word in given if word.startswith("--")} <= allowed, page


# Options of pip, Docker, SGLang's router, the examples and slime.
OF_OTHERS = {
    "--editable",
    "--build-arg",
    "--cache-threshold",
    "--decode-policy",
    "--url",
    "--sglang-",
}


@pytest.mark.parametrize("page", PAGES)
def test_options_in_sentences_exist(page: str) -> None:
    code = [each for each in inline_code(PAGES[page]) if not each.startswith("python")]
    ours = set().union(*map(options, our_parsers().values()))
    assert set(flags(" ".join(code))) <= {*sglang_options(), *ours, *OF_OTHERS}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rollouts --url http://127.0.0.1:1", "http://127.0.0.1:1/v1/models: Connection error."),
        (
            "few_shot --shots -1",
            "few_shot.py: error: --questions 64 --shots -1; allowed: at least 1 each",
        ),
        ("rl_rollouts missing", "MODEL missing: no config.json there; allowed: the folder of a"),
    ],
)
def test_an_example_that_cannot_run_says_why(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, *arguments = words.split()
    path = str(ROOT / f"examples/{script}.py")
    monkeypatch.setattr("sys.argv", [path, *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(path, run_name="__main__")
    assert message in f"{capsys.readouterr().err}{stop.value.code}"

"""Compare flags read from the text of SGLang's source with SGLang's own answers."""

from __future__ import annotations

import argparse

from sglang.srt import server_args

from sglang_pat.offline.launch_flags import attention_backends, launch_flags


def test_every_flag_is_found() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    server_args.ServerArgs.add_cli_args(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    known = launch_flags()
    unknown = {flag for flag in flags if flag.replace("--no-", "--", 1) not in known} - known
    assert len(flags) > 300
    assert unknown == set()
    assert "--nonsense" not in known


def test_every_attention_backend_is_found() -> None:
    choices = set(server_args.ATTENTION_BACKEND_CHOICES)
    assert {"fa3", "triton", "torch_native"} <= attention_backends() <= choices
    assert choices - attention_backends() <= {"pat"}

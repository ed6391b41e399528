"""Two versions of the kernels, old against new: time of a decode step and of its two kernels.

    python bench_versions.py --old DIR --new DIR [--repeats 3] [--json FILE]

DIR is a folder with an installed copy of sglang_pat (`pip install --target DIR --no-deps .`). Each
copy runs in processes of its own, with DIR first in PYTHONPATH, old and new in turn. The cases
stress the merge. Columns: `step`, one layer (events around 1 to 8 layers, each with K and V of its
own, slots scattered, L2 flushed by reading; median); `pack` and `merge`, the kernels' own durations
(profiler, median; `merge` starts early and waits); `error`, the largest deviation from float64 over
that of torch in float16.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

_CHILD = "--child"
CASES = [
    ("1_131072", 8, 1),
    ("1_131072", 32, 8),
    ("8_50000", 8, 1),
    ("128_1024", 32, 8),
    ("1,10_4096,416", 8, 1),
    ("1,10_4096,416", 32, 8),
    ("1,2,4,8,16,32,64,128_256,128,128,64,64,64,32,32", 32, 8),
]
HEAD_DIM = 128
ROUNDS = 40


def measure() -> list[dict[str, object]]:
    import torch
    from pat_trees import PrefixTree

    import sglang_pat
    from sglang_pat import PackAttention
    from sglang_pat.executors.reference import dense_attention

    if not os.path.realpath(sglang_pat.__file__).startswith(
        os.path.realpath(os.environ["PYTHONPATH"])
    ):
        sys.exit(
            f"{sglang_pat.__file__} is not in {os.environ['PYTHONPATH']}: an editable install?"
        )
    print(f"{sglang_pat.__file__}, {torch.cuda.get_device_name()}", file=sys.stderr)
    flush = torch.ones(256 << 20, dtype=torch.uint8, device="cuda").view(torch.int32)

    def timed(run, layers: int) -> float:
        pairs = []
        for i in range(ROUNDS + 5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.sum()  # reads, so that nothing is written back during the measurement
            begin.record()
            run()
            end.record()
            if i >= 5:
                pairs.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(1e3 * b.elapsed_time(e) for b, e in pairs) / layers

    def kernels(run) -> dict[str, float]:
        activity = torch.profiler.ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[activity]) as profile:
            for _ in range(15):
                flush.sum()
                run()
            torch.cuda.synchronize()
        found = {}
        for short, name in (("pack", "pack_decode_kernel"), ("merge", "merge_partials_kernel")):
            times = [e.device_time for e in profile.events() if name in e.name]
            found[short] = statistics.median(times) if times else 0.0
        return found

    results = []
    for name, heads, kv_heads in CASES:
        tree = PrefixTree.parse(name)
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16)

        q = random(tree.num_requests, heads, HEAD_DIM)
        table = torch.from_numpy(tree.token_table(seed=0)).cuda()
        rows = torch.arange(tree.num_requests, device="cuda")
        lens = torch.full((tree.num_requests,), tree.seq_len, dtype=torch.int64, device="cuda")
        bytes_per_layer = tree.num_tokens * kv_heads * HEAD_DIM * 4
        layers = max(1, min(8, (1 << 30) // bytes_per_layer))
        pool = (tree.pool_size(), kv_heads, HEAD_DIM)
        caches = [(random(*pool), random(*pool)) for _ in range(layers)]
        every = max(1, tree.num_requests // 8)
        exact, plain = (
            dense_attention(
                q[::every], *caches[0], table, rows[::every], lens[::every], dtype=dtype
            )[0]
            for dtype in (torch.float64, torch.float16)
        )
        bound = (plain.double() - exact).abs().max().item()
        for mode in ("eager", "graph"):
            case = {"case": f"{name} {heads}/{kv_heads}", "mode": mode}
            try:
                attention = PackAttention(
                    heads,
                    kv_heads,
                    HEAD_DIM,
                    dtype=torch.float16,
                    device="cuda",
                    max_requests=tree.num_requests if mode == "graph" else None,
                )
                plan = attention.plan(
                    tree.batch(), req_to_token=table, req_pool_indices=rows, seq_lens=lens
                )
            except ValueError as error:
                results.append(case | {"failed": str(error)[:100]})
                continue
            out = torch.empty_like(q)

            def run(attention=attention, q=q, out=out, caches=caches) -> None:
                for k, v in caches:
                    attention.run(q, k, v, out=out)

            attention.run(q, *caches[0], out=out)
            error = (out[::every].double() - exact).abs().max().item() / bound
            first = out.clone()
            for _ in range(10):
                attention.run(q, *caches[0], out=out)
                assert torch.equal(out, first), "other bits"
            if mode == "graph":
                run()
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    run()
                run = graph.replay
                run()
                graph_out = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph_out):
                    attention.run(q, *caches[0], out=out)
                out.fill_(torch.nan)
                graph_out.replay()
                assert torch.equal(out, first), "other bits in a graph"
            header = plan.header
            case |= {"layers": layers, "merges": header.num_merges, "partials": header.num_partials}
            case |= {"step": timed(run, layers), "error": error} | kernels(run)
            results.append(case)
        del caches
        torch.cuda.empty_cache()
    return results


def main() -> int:
    if sys.argv[1:] == [_CHILD]:
        print(json.dumps(measure()))
        return 0
    # Here: the copies may be older than what is imported.
    from sglang_pat.cli.arguments import Parser, folder_path, whole_number
    from sglang_pat.output_file import output_file

    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=folder_path)
    parser.add_argument("--new", type=folder_path)
    parser.add_argument("--repeats", type=whole_number(1, 1000), default=3)
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    for name in ("old", "new"):
        folder = getattr(arguments, name)
        if folder is not None and not (folder / "sglang_pat").is_dir():
            parser.error(f"--{name} {folder}: no sglang_pat in it")
    if arguments.old is arguments.new is None:
        parser.error("give --old DIR, --new DIR or both")
    folders = {"old": arguments.old, "new": arguments.new}
    runs: dict[str, list[list[dict]]] = {"old": [], "new": []}
    for _ in range(arguments.repeats):
        for side, folder in folders.items():
            if folder is None:
                continue
            environment = os.environ | {"PYTHONPATH": str(folder)}
            done = subprocess.run(
                [sys.executable, os.path.abspath(__file__), _CHILD],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                cwd="/",
            )
            if done.returncode:
                print(f"{side}: exit status {done.returncode}")
                return 1
            runs[side].append(json.loads(done.stdout.splitlines()[-1]))
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1))
    sides = [side for side in runs if runs[side]]
    print(
        f"{'case':60}{'mode':>7}"
        + "".join(f"{s + ' ' + f:>11}" for f in ("step", "pack", "merge") for s in sides)
        + f"{'err':>6}"
    )
    for index, case in enumerate(runs[sides[0]][0]):
        line = f"{case['case'][:58]:60}{case['mode']:>7}"
        for field in ("step", "pack", "merge"):
            for side in sides:
                values = [r[index][field] for r in runs[side] if field in r[index]]
                line += f"{statistics.median(values):11.1f}" if values else f"{'failed':>11}"
        errors = [r[index]["error"] for s in sides for r in runs[s] if "error" in r[index]]
        print(line + (f"{max(errors):6.2f}" if errors else f"  {case.get('failed')}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

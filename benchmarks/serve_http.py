"""CPU time of the HTTP processes per streamed token, with 1, 8 and 64 clients.

    python benchmarks/serve_http.py
    python benchmarks/serve_http.py --fronts 2              # in turns with a server of 2 HTTP processes
    python benchmarks/serve_http.py --compare ../older      # in turns with another checkout of Colonnade
    python benchmarks/serve_http.py --tiny                  # few tokens: a smoke test

``colonnade serve`` serves a model of one narrow layer, which generates faster than any real one, with chats streamed
over keep-alive connections. Nothing is replaced: the CPU time of the HTTP processes (with fronts that of the process
which supervises them too) is read from the kernel, and the engine and the clients are separate processes.
``tokens_per_s`` depends on how many cores they share, and on the engine: it shows what fronts gain only where one HTTP
process is the bottleneck.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import tokenizers
import torch

from colonnade import api
from colonnade.config import ModelConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.model import Transformer, initialise
from colonnade.parallel.axis import SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext
from harness.paired_timing import OtherProcesses, run_interleaved
from harness.report import RESULTS, ROOT, Cell, Headline, report
from harness.rows import format_row, round_significant
from harness.served import running_server

CLIENTS = (1, 8, 64)
TOKENS = 200
"""Tokens of an answer."""


def save_model(folder: Path) -> None:
    """A model of one narrow layer whose tokens are words, so that each token of an answer is sent at once."""
    words = tokenizers.models.WordLevel({f"word{i} ": i for i in range(256)}, unk_token="word0 ")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(tokenizers.Tokenizer(words), bos_id=None, eos_ids=(0,), chat_template=template)
    config = ModelConfig(vocab_size=256, layers=1, width=16, heads=2, head_width=8, ffn_width=16, context=512)
    model = initialise(Transformer(config, SOLO_AXES, dtype=torch.float32), seed=1)
    api.save(api.Model(model, tokenizer, DistributedContext.solo(torch.device("cpu")), "tiny"), folder)


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a server, and of its fronts: children in its session, which the engines are not."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fronts = [child for child in map(int, children) if os.getsid(child) == os.getsid(pid)]
    paths = (path for each in (pid, *fronts) for path in Path(f"/proc/{each}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in paths)


async def stream(port: int, answers: int) -> None:
    """One client: ``answers`` chats, one after the other, on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = json.dumps(
        {"messages": [{"role": "user", "content": "the words"}], "max_tokens": TOKENS, "stream": True,
         "temperature": 0, "ignore_eos": True}
    ).encode()  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    for _ in range(answers):
        writer.write(head.encode() + body)
        reply = await reader.readuntil(b"data: [DONE]")
        assert reply.startswith(b"HTTP/1.1 200 "), reply
        assert reply.count(b"data: {") >= TOKENS, "each token must be an event"
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    await writer.wait_closed()


def crowd(server: tuple[int, int], clients: int, answers: int, _: int) -> dict[str, float]:
    """``clients`` clients at once; the CPU time of HTTP per token, and the tokens per second of all."""
    pid, port = server

    async def all_of_them() -> None:
        await asyncio.gather(*(stream(port, answers) for _ in range(clients)))

    before, began = cpu_ns(pid), time.perf_counter()
    asyncio.run(all_of_them())
    tokens = clients * answers * TOKENS
    return {
        "us_per_token": (cpu_ns(pid) - before) / 1e3 / tokens,
        "tokens_per_s": tokens / (time.perf_counter() - began),
    }


def measure(
    servers_of: dict[str, tuple[Path, int]], rounds: int, answers: int
) -> tuple[list[dict[str, Cell]], list[Headline]]:
    """Rows and headlines for servers of (checkout, number of HTTP processes)."""
    rows: list[dict[str, Cell]] = []
    heads = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / "tiny"
        save_model(model)
        servers = {}
        for who, (root, fronts) in servers_of.items():
            flags = ("--serve.fronts", str(fronts)) if fronts > 1 else ()
            url, pid = stack.enter_context(running_server(model, *flags, root=root, OMP_NUM_THREADS="1"))
            servers[who] = pid, int(url.rpartition(":")[2])
        for clients in CLIENTS:
            each = max(1, answers // clients)
            results = run_interleaved({who: partial(crowd, at, clients, each) for who, at in servers.items()}, rounds)
            for who, measured in results.items():
                medians = {
                    key: round_significant(statistics.median(one[key] for one in measured), 3) for key in measured[0]
                }
                rows.append({"who": who, "clients": clients, "tokens": clients * each * TOKENS, **medians})
                print(format_row(rows[-1]), flush=True)
            ours, *others = (float(row["us_per_token"] or 0) for row in rows if row["clients"] == clients)
            peer = (list(servers_of)[1], others[0]) if others else ("", None)
            heads.append(Headline(f"CPU time of HTTP per streamed token, {clients} clients", ours, "µs", *peer))
    return rows, heads


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few tokens; writes no record")
    parser.add_argument("--compare", type=Path, help="another checkout of Colonnade")
    parser.add_argument("--fronts", type=int, default=1, help="HTTP processes of another server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    servers = {"colonnade": (ROOT, 1)}
    if args.compare:
        servers["the previous version"] = (args.compare.resolve(), 1)
    if args.fronts > 1:
        servers[f"{args.fronts} fronts"] = (ROOT, args.fronts)
    around = OtherProcesses()
    rows, heads = measure(servers, 1 if args.tiny else args.rounds, 1 if args.tiny else 8)
    if not args.tiny:
        report(
            "serve_http" if args.fronts == 1 else "serve_http_fronts",
            rows,
            f"medians of {args.rounds} rounds, in turns; {around}, the servers included",
            headlines=heads,
            folder=args.out,
        )


if __name__ == "__main__":
    main()

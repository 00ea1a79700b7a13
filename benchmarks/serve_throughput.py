"""Tokens per second over HTTP compared with the same engine without HTTP, with the same requests.

    python benchmarks/serve_throughput.py                # one GPU: 256 streams, a Qwen3-0.6B with random weights
    python benchmarks/serve_throughput.py --tiny         # a few short streams on a CPU: a smoke test

The requests are those of ``engine.py``: prompts and answers of 100 to 1024 tokens, greedy, end tokens ignored, all sent
at once. In process, :meth:`Engine.generate` runs them. Over HTTP, ``colonnade serve`` streams every response to a
separate client, in separate processes; each token is an event, and a stream counts from before its request is sent
until its ``[DONE]``.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch

from colonnade import api
from colonnade.config import ServeConfig
from colonnade.config.presets import preset
from colonnade.model import Transformer, initialise
from colonnade.parallel.axis import SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine
from harness.engine_load import Load, all_batch_sizes, random_load, run_colonnade, word_tokenizer
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row, round_significant
from harness.served import running_server

PROCESSES = 4
"""Client processes."""


def save_model(folder: Path, tiny: bool) -> api.Model:
    """A model with random weights."""
    config = preset("tour-moe" if tiny else "qwen3-0.6b")
    config = config.replace(vocab_size=300) if tiny else config
    device = torch.device("cpu" if tiny else "cuda")
    model = Transformer(config, SOLO_AXES, device=device, dtype=torch.float32 if tiny else torch.bfloat16)
    whole = api.Model(
        initialise(model, seed=1), word_tokenizer(config.vocab_size), DistributedContext.solo(device), "random"
    )
    api.save(whole, folder)
    return whole


async def stream(port: int, prompt: list[int], count: int) -> int:
    """Events of one answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    fields = {"prompt": prompt, "max_tokens": count, "stream": True, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    reply = await reader.readuntil(b"data: [DONE]")
    assert reply.startswith(b"HTTP/1.1 200 "), reply[:500]
    writer.close()
    return reply.count(b"data: {")


def client(
    port: int, load: Load, ready: "multiprocessing.synchronize.Barrier", results: "multiprocessing.Queue"
) -> None:
    """One client process: all streams of ``load`` at once."""

    async def streams() -> list[int]:
        return await asyncio.gather(*(stream(port, p, n) for p, n in zip(load.prompts, load.counts, strict=True)))

    ready.wait()
    results.put(sum(asyncio.run(streams())))


def over_http(port: int, load: Load) -> float:
    """Tokens per second of all streams."""
    context = multiprocessing.get_context("fork")
    ready, results = context.Barrier(PROCESSES + 1), context.Queue()
    parts = [Load(load.prompts[i::PROCESSES], load.counts[i::PROCESSES]) for i in range(PROCESSES)]
    processes = [context.Process(target=client, args=(port, part, ready, results)) for part in parts]
    for process in processes:
        process.start()
    ready.wait()
    began = time.perf_counter()
    events = sum(results.get() for _ in processes)
    seconds = time.perf_counter() - began
    for process in processes:
        process.join()
    assert events >= load.tokens, f"{events} events for {load.tokens} tokens"
    return load.tokens / seconds


def measure(tiny: bool, requests: int, rounds: int) -> tuple[list[dict[str, Cell]], list[Headline]]:
    least, most = (3, 12) if tiny else (100, 1024)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random"
        whole = save_model(path, tiny)
        load = random_load(requests, least, most, whole.config.vocab_size)
        warm = all_batch_sizes(requests)
        engine = Engine(whole.transformer, whole.tokenizer, ServeConfig(max_requests=requests))
        run_colonnade(engine, warm)
        run_colonnade(engine, load)  # compiles what the shapes of this load need
        inside = [load.tokens / run_colonnade(engine, load).seconds for _ in range(rounds)]
        print("in process", inside, flush=True)
        del engine, whole
        if not tiny:  # the server's cache takes what is free
            gc.collect()
            torch.cuda.empty_cache()
        flags = ("--serve.log", "off", "--serve.max_requests", str(requests))
        with running_server(path, *flags, device="cpu" if tiny else "cuda") as (url, _):
            port = int(url.rpartition(":")[2])
            over_http(port, warm)
            over_http(port, load)
            outside = [over_http(port, load) for _ in range(rounds)]
        print("over HTTP", outside, flush=True)
    rows: list[dict[str, Cell]] = [
        {
            "who": who,
            "requests": requests,
            "tokens": load.tokens,
            "tokens_per_s": round_significant(statistics.median(each), 4),
        }
        for who, each in (("in process", inside), ("over HTTP", outside))
    ]
    for row in rows:
        print(format_row(row), flush=True)
    what = f"Streamed over HTTP, {requests} requests, Qwen3-0.6B, bfloat16"
    return rows, [Headline(what, statistics.median(outside), "tokens/s", "in process", statistics.median(inside))]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU; writes no record")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    rounds = 1 if args.tiny else args.rounds
    rows, heads = measure(args.tiny, args.requests or (6 if args.tiny else 256), rounds)
    if not args.tiny:
        report("serve_throughput_h200", rows, f"medians of {rounds} rounds", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()

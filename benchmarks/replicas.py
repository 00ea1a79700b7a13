"""Replicas on separate cores against one engine: tokens/s and prefix hits, over HTTP.

    python benchmarks/replicas.py                # SmolLM2-135M, 2 replicas
    python benchmarks/replicas.py --tiny         # a smoke test: few requests

Three servers run at the same time and are asked in turns: one engine on one core, one engine on all cores, and a
replica on each core (float32). 16 clients per core each send the next request when the last one is answered: 32 tokens
after a prompt of its own. The clients and the HTTP processes use the same cores.

Prefixes: conversations that share a system prompt of about 500 tokens in groups, each of several turns, at the same
time. The share of prompt tokens that the prefix cache had is counted for one engine, and for the replicas behind the
router. The median round counts.
"""

import argparse
import asyncio
import os
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from colonnade.data.readers import sotu_documents
from harness.paired_timing import OtherProcesses, run_interleaved, wall_clock
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row
from harness.served import running_server

CLIENTS, TOKENS = 16, 32
GROUPS, TURNS = 6, 3
SYSTEM_WORDS = 350


@contextmanager
def server(replicas: int, cores: set[int]) -> Iterator[str]:
    """The URL of ``colonnade serve smollm2`` on ``cores``."""
    flags = ("--serve.log", "off", "--serve.replicas", str(replicas), "--serve.pages", "1024")
    before = os.sched_getaffinity(0)
    with ExitStack() as stack:
        os.sched_setaffinity(0, cores)
        try:
            url, _ = stack.enter_context(running_server("smollm2", *flags))
        finally:
            os.sched_setaffinity(0, before)
        yield url


async def generate(url: str, clients: int, requests: int, offset: int) -> None:
    """Answer ``requests`` prompts that no other round has."""
    todo = iter(range(requests))

    async def client(http: httpx.AsyncClient) -> None:
        for i in todo:
            body = {"prompt": f"{offset + i}. The history of", "max_tokens": TOKENS, "ignore_eos": True, "seed": i}
            (await http.post(f"{url}/v1/completions", json=body)).raise_for_status()

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=clients)) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))


async def converse(url: str, groups: int, offset: int) -> None:
    """Conversations of :data:`TURNS` turns, two at the same time for each system prompt."""
    words = sotu_documents()[-1][1].split()

    async def conversation(http: httpx.AsyncClient, group: int, number: int) -> None:
        start = 97 * (offset + group)
        prompt = f"{offset + group}. {' '.join(words[start % 3000 :][:SYSTEM_WORDS])}\n"
        for turn in range(TURNS):
            prompt += f"\nQuestion {number}.{turn}: what comes next?\n"
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "seed": turn}
            reply = await http.post(f"{url}/v1/completions", json=body)
            prompt += reply.raise_for_status().json()["choices"][0]["text"]

    async with httpx.AsyncClient(timeout=600) as http:
        for number in range(2):  # the second of a group comes when the first one is in the cache
            await asyncio.gather(*(conversation(http, group, number) for group in range(groups)))


def cached(url: str) -> tuple[float, float]:
    """(prompt tokens looked up in the prefix cache, those found) since the start."""
    text = httpx.get(f"{url}/metrics").text
    found = [re.search(rf"prefix_cache_{name}_total{{[^}}]*}} (\S+)", text) for name in ("queries", "hits")]
    return float(found[0][1]) if found[0] else 0.0, float(found[1][1]) if found[1] else 0.0


def hit_rate(url: str, groups: int, offset: int) -> float:
    before = cached(url)
    asyncio.run(converse(url, groups, offset))
    queries, hits = (now - then for now, then in zip(cached(url), before, strict=True))
    return hits / queries


def measure(requests: int, groups: int, rounds: int) -> tuple[list[dict[str, Cell]], list[Headline], str]:
    cores, neighbours = sorted(os.sched_getaffinity(0)), OtherProcesses()
    count = len(cores)
    if count < 2:
        raise SystemExit("this benchmark needs two cores; it may use one")
    with ExitStack() as running:
        one = "1 engine, 1 core"
        many = f"{count} replicas, 1 core each"
        urls = {
            one: running.enter_context(server(1, set(cores[:1]))),
            f"1 engine, {count} cores": running.enter_context(server(1, set(cores))),
            many: running.enter_context(server(count, set(cores))),
        }
        used = dict(zip(urls, (1, count, count), strict=True))

        def asked(who: str) -> Callable[[int], float]:
            clients, each = CLIENTS * used[who], requests * used[who]
            return wall_clock(lambda i: asyncio.run(generate(urls[who], clients, each, i * each)))

        seconds = run_interleaved({who: asked(who) for who in urls}, rounds)
        rates = run_interleaved(
            {who: lambda i, url=urls[who]: hit_rate(url, groups, i * groups) for who in (one, many)}, rounds
        )
    rows: list[dict[str, Cell]] = []
    for who, times in seconds.items():
        median = statistics.median(times)
        rows.append(
            {
                "who": who,
                "tokens_per_s": round(used[who] * requests * TOKENS / median, 1),
                "slowest_round_tokens_per_s": round(used[who] * requests * TOKENS / max(times), 1),
                "prefix_hits": round(statistics.median(rates[who]), 4) if who in rates else None,
                "requests": used[who] * requests,
                "clients": used[who] * CLIENTS,
            }
        )
        print(format_row(rows[-1]), flush=True)
    by_name = {str(row["who"]): row for row in rows}
    heads = [
        Headline(f"SmolLM2 on a CPU, {many}, {CLIENTS} clients a core", by_name[many]["tokens_per_s"], "tokens/s",
                 one, by_name[one]["tokens_per_s"]),
        Headline(f"Prompt tokens found in the prefix cache, {many}", by_name[many]["prefix_hits"], "of all",
                 "one engine", by_name[one]["prefix_hits"]),
    ]  # fmt: skip
    load = f"load average {os.getloadavg()[1]:.1f} over 5 minutes on {count} cores"
    return rows, heads, f"{neighbours}, the servers included; {load}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, help="for each core and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="few requests; writes no record")
    args = parser.parse_args(argv)
    if args.tiny:
        measure(4, 1, 1)
        return
    rows, heads, load = measure(args.requests, GROUPS, args.rounds)
    report("replicas_cpu", rows, notes=f"{__doc__}\n{load}", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()

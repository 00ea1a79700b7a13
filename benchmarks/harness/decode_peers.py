"""Engines beside which decode_cpu_quantised measures ours, in a process with packages of its own.

    PYTHON decode_peers.py vllm|ctranslate2|transformers FOLDER DTYPE

FOLDER has a model in Hugging Face's format; DTYPE is that of its weights, ``int8`` for CTranslate2 only. Each line of
the input is JSON: the token ids of some prompts, and how many tokens each request gets, greedily, whatever they are.
The answer is a line with the CPU time of the process until all have their first token, that from there to the last
token, and the tokens.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

PEERS = ("vllm", "ctranslate2", "transformers")
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
           "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
           "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip
"""Environment of the process: one thread, no network, and vLLM's engine in this process."""
Prompts = Sequence[Sequence[int]]


class DecodeTimes(NamedTuple):
    """CPU times of one run [s]."""

    first_s: float
    """Until all requests have their first token."""
    rest_s: float
    """From there to the last token."""
    ids: list[list[int]]


Run = Callable[[Prompts, int], DecodeTimes]


# -- the process of an engine ------------------------------------------------------------------------------------------


def vllm(folder: str, dtype: str) -> Run:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(folder, dtype=dtype, max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=2048,
                 enable_prefix_caching=False).llm_engine  # fmt: skip
    number = 0

    def run(prompts: Prompts, new_tokens: int) -> DecodeTimes:
        nonlocal number
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        answers: dict[str, list[int]] = {}
        began, first = time.process_time(), None
        for prompt in prompts:
            answers[str(number)] = []
            engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, params)
            number += 1
        while engine.has_unfinished_requests():
            for output in engine.step():
                name = next(name for name in answers if output.request_id.partition("-")[0] == name)
                answers[name] = list(output.outputs[0].token_ids)
            if first is None and all(answers.values()):
                first = time.process_time()
        assert first is not None
        return DecodeTimes(first - began, time.process_time() - first, list(answers.values()))

    return run


def ctranslate2(folder: str, dtype: str) -> Run:
    import ctranslate2 as engine  # type: ignore[import-not-found]
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as converted:
        engine.converters.TransformersConverter(folder).convert(converted, quantization=dtype, force=True)
        generator = engine.Generator(converted, compute_type=dtype, inter_threads=1, intra_threads=1)

    def run(prompts: Prompts, new_tokens: int) -> DecodeTimes:
        tokens = [tokenizer.convert_ids_to_tokens(list(prompt)) for prompt in prompts]
        ticks: list[float] = []

        def tick(_: Any) -> bool:
            ticks.append(time.process_time())
            return False

        began = time.process_time()
        results = generator.generate_batch(
            tokens, max_length=new_tokens, min_length=new_tokens, include_prompt_in_result=False, callback=tick,
        )  # fmt: skip
        ids = [result.sequences_ids[0] for result in results]
        return DecodeTimes(ticks[len(prompts) - 1] - began, ticks[-1] - ticks[len(prompts) - 1], ids)

    return run


def transformers(folder: str, dtype: str) -> Run:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model.generation_config.eos_token_id = None

    class Clock(StoppingCriteria):
        """Never stops; records the CPU time of each token."""

        def __init__(self) -> None:
            self.ticks: list[float] = []

        def __call__(self, input_ids: Any, scores: object, **_: object) -> Any:
            self.ticks.append(time.process_time())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def run(prompts: Prompts, new_tokens: int) -> DecodeTimes:
        clock, ids_BS = Clock(), torch.tensor(prompts)
        began = time.process_time()
        out_BS = model.generate(ids_BS, attention_mask=torch.ones_like(ids_BS), max_new_tokens=new_tokens,
                                do_sample=False, use_cache=True,
                                stopping_criteria=StoppingCriteriaList([clock]))  # fmt: skip
        first, last = clock.ticks[0], clock.ticks[-1]
        return DecodeTimes(first - began, last - first, out_BS[:, ids_BS.shape[1] :].tolist())

    return run


def main() -> None:
    """Answer lines until the input ends. Engines print; so answers leave through a copy of the output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run: Run = {"vllm": vllm, "ctranslate2": ctranslate2, "transformers": transformers}[sys.argv[1]](*sys.argv[2:])
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        prompts, new_tokens = json.loads(line)
        print(json.dumps(run(prompts, new_tokens)), file=answers, flush=True)


# -- the side of the benchmark -----------------------------------------------------------------------------------------


@contextmanager
def peer_process(name: str, python: Path, folder: Path, dtype: str, log: TextIO) -> Iterator[Run]:
    """A function that runs an engine in a process of ``python``, which ends with the block; it writes to ``log``."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | THREADS
    process = subprocess.Popen(
        [python, Path(__file__), name, folder, dtype], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    to, answers = process.stdin, process.stdout

    def answer() -> Any:
        line = answers.readline()
        if not line:
            raise RuntimeError(f"{name} ended: {Path(log.name).read_text()[-2000:]}")
        return json.loads(line)

    def run(prompts: Prompts, new_tokens: int) -> DecodeTimes:
        print(json.dumps([prompts, new_tokens]), file=to, flush=True)
        return DecodeTimes(*answer())

    with process:
        try:
            answer()
            yield run
        finally:
            to.close()


if __name__ == "__main__":
    main()

"""Run by ``export.py`` in a new process: an exported package, with no import that it does not need.

python benchmarks/harness/package_start.py FOLDER STEPS TOKEN …
"""

import json
import statistics
import sys
import time
from pathlib import Path

from colonnade.package_chat import load_package


def main() -> None:
    folder, steps, *prompt = sys.argv[1:]
    package, ids = load_package(Path(folder), trust=True), [int(token) for token in prompt]
    ids.append(int(package.logits(ids).argmax()))
    print(json.dumps({"first": time.time(), "cpu": time.process_time()}), flush=True)
    took = []
    for _ in range(int(steps)):
        began = time.perf_counter()
        ids.append(int(package.logits(ids).argmax()))
        took.append(time.perf_counter() - began)
    print(json.dumps({"step_ms": 1e3 * statistics.median(took), "tokens": ids[len(prompt) :]}), flush=True)


if __name__ == "__main__":
    main()

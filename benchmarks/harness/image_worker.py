"""A worker that classifies JPEG images over HTTP, one process of one model.

    python -m harness.image_worker --model resnet50 --size 384 [--overlap] [--dtype bfloat16] [--decode_cpus 0 1 2 3]

    POST /  JPEG -> decode, resize, normalise -> network -> softmax, five best classes -> JSON

A thread a connection, and one thread that runs the network, since OpenMP has a set of threads for each that calls it.
With --overlap the other stages run in the connections' threads, concurrently with the network of another request;
otherwise one thread runs all three. Threads, affinity and OpenMP's settings are inherited (:mod:`colonnade.cores`).
--decode_cpus are the CPUs of the connections' threads, if they differ from the network's.
"""

import argparse
import io
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from harness.resnet import STAGES, classifier

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's channels."""
BEST = 5


def prepare(jpeg: bytes, size: int, dtype: torch.dtype) -> Tensor:
    """x_1CHW of a JPEG image, resized to ``size`` x ``size``; in numpy, which starts no threads."""
    image = Image.open(io.BytesIO(jpeg)).convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    pixels_HWC = np.asarray(image, dtype=np.float32) / 255
    x_HWC = (pixels_HWC - np.float32(MEAN)) / np.float32(STD)
    return torch.from_numpy(np.ascontiguousarray(x_HWC.transpose(2, 0, 1))[None]).to(dtype)


def answer(logits_1K: Tensor) -> bytes:
    """The five most probable classes as JSON."""
    best = logits_1K[0].float().softmax(-1).topk(BEST)
    classes = [{"class": i, "probability": p} for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return json.dumps(classes).encode()


def handler(
    model: nn.Module, size: int, dtype: torch.dtype, *, overlap: bool, decode_cpus: Sequence[int] = ()
) -> type[BaseHTTPRequestHandler]:
    """Answers one connection, in a thread on ``decode_cpus`` if there are any."""
    network = ThreadPoolExecutor(1)

    @torch.inference_mode()
    def run(x_1CHW: Tensor) -> Tensor:
        return model(x_1CHW)

    def classify(jpeg: bytes) -> bytes:
        return answer(run(prepare(jpeg, size, dtype)))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            if decode_cpus:
                os.sched_setaffinity(0, decode_cpus)  # of this thread
            super().setup()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if overlap:
                reply = answer(network.submit(run, prepare(body, size, dtype)).result())
            else:
                reply = network.submit(classify, body).result()
            with suppress(ConnectionError):  # the client waits no longer
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=STAGES, default="resnet50")
    parser.add_argument("--size", type=int, default=384, help="height and width of the network's input")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--overlap", action="store_true", help="overlap the stages of different requests")
    parser.add_argument("--decode_cpus", nargs="+", type=int, default=[], help="CPUs of the connections' threads")
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    model = classifier(args.model, dtype)
    handles = handler(model, args.size, dtype, overlap=args.overlap, decode_cpus=args.decode_cpus)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handles)
    server.daemon_threads = True
    print(f"serving http://127.0.0.1:{server.server_port} with {torch.get_num_threads()} threads", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

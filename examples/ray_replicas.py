"""Servers as Ray actors, on any machines of a Ray cluster, and one in front of them:

    pip install ray 'colonnade[serve]'
    python examples/ray_replicas.py smollm2 --replicas 4 --port 8000

Each actor is a server on a free port of its machine; --gpus is the number of GPUs for each (its --plan.tp). The front
removes one that does not respond, and continues with the others.
"""

import argparse
import subprocess
import sys

import ray  # pyrefly: ignore[missing-import]


@ray.remote
class Replica:
    """One ``colonnade serve``."""

    def __init__(self, model: str, gpus: int):
        flags = ["--serve.host", "0.0.0.0", "--serve.port", "0", "--serve.log", "off", "--plan.tp", str(max(1, gpus))]
        command = [sys.executable, "-m", "colonnade", "serve", model, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        lines = [self.process.stderr.readline() for _ in range(2)]
        if not lines[1].startswith("serving "):
            raise RuntimeError(f"the server did not start: {lines}")
        port = lines[1].split()[3].rsplit(":", 1)[1]
        self.url = f"http://{ray.util.get_node_ip_address()}:{port}"

    def address(self) -> str:
        """The server's URL."""
        return self.url

    def stop(self) -> None:
        """Let the server finish its requests and end."""
        self.process.terminate()
        self.process.wait()


def main() -> None:
    """Start all, and wait for the front to end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    ray.init()
    options = {"num_cpus": args.cpus, "num_gpus": args.gpus}
    replicas = [Replica.options(**options).remote(args.model, args.gpus) for _ in range(args.replicas)]  # pyrefly: ignore[missing-attribute]
    urls = ",".join(ray.get([replica.address.remote() for replica in replicas]))
    flags = ["--serve.upstreams", urls, "--serve.port", str(args.port)]
    try:
        subprocess.run([sys.executable, "-m", "colonnade", "serve", args.model, *flags], check=True)
    finally:
        ray.get([replica.stop.remote() for replica in replicas])


if __name__ == "__main__":
    main()

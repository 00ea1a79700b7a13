"""AdamW on this rank's own float32 shards: torch's fused kernel, or our own in a single pass over memory.

    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
    w ← w (1 − η λ) − η · (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)          (Loshchilov 2017, arXiv 1711.05101)

The optimizer is element-wise, so it needs no knowledge of the layout. It gets plain local tensors, which torch's fused
kernel updates in one launch (measured for 200 matrices of 64 × 64 on a CPU: 1.6 ms per step, compared with 8.7 ms for
torch's own loop over DTensors). Weight decay λ applies to matrices and embeddings only: vectors (biases and norms)
scale and shift, and the next matrix would have to undo their decay.

:class:`AdamW` needs separate passes for the clip and for the compute-type copies of the weights: 52 bytes of memory
traffic per weight in bfloat16. :class:`FusedAdamW` clips, updates moments and masters and writes the copies in a single
pass: 28 bytes (:mod:`colonnade.kernels.adamw` has the count). State, schedule and checkpoint are the same. With one
micro-batch per step it reads the gradients in the compute type, as autograd made them: nothing is accumulated, so
float32 would hold the same values.

Everything that decides about a step (skip, scale, clip) is a tensor on the device, so nothing synchronises.

:class:`OffloadedAdamW` keeps the moments in host memory and copies them to the device and back one bucket at a time:

    bucket i−1 is copied to the host      |
    bucket i   is updated                 |  concurrently, on three streams, in three staging buffers
    bucket i+1 is copied to the device    |

m and v are two thirds of the memory per weight in float32 training (8 of 12 bytes; of 14 and 16 with copies in a lower
type), and each step needs them only once. (ZeRO-Offload, arXiv 2101.06840, also moves the update to the CPU. Here it
stays on the device: a link of 50 GB/s carries the moments of a billion weights in a sixth of a second, both ways at
once, and the update is the same kernel with bitwise equal results.) The copies saturate the link, and the step waits
for them: see the table in docs/howto/precision.md.

Adam's step count, four bytes per weight, stays on the device, where the fused kernel needs it. On a CPU the same
buckets are updated in place, so a test there covers everything but the copies.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from colonnade.config import TrainConfig
from colonnade.kernels.adamw import ParameterState, step_sizes
from colonnade.kernels.registry import choose
from colonnade.parallel.fsdp import Masters

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of m and v, under which a checkpoint stores them."""
BUCKET_BYTES = 1 << 28
"""Moments copied together: large enough for the link's full speed; staging memory is three times this. A weight with
larger moments gets its own bucket."""


@torch.no_grad()
def torch_fused_adamw(
    group: Mapping[str, Any],
    weights: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update ``weights``, all of which have gradients, by torch's fused kernel with the settings of ``group``."""
    if not weights:
        return
    adamw(
        weights,
        [w.grad for w in weights if w.grad is not None],
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        fused=True,
        grad_scale=grad_scale,
        found_inf=found_inf,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class _TorchAdamW:
    """:class:`torch.optim.AdamW` with ``fused=True``, but without importing torch.compile (a second per process), which
    any ``torch.optim.Optimizer`` does.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any):
        self.param_groups = [{**options, **group} for group in groups]
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    def step(self) -> None:
        """Update the weights that have gradients."""
        for group in self.param_groups:
            weights = [w for w in group["params"] if w.grad is not None]
            states = [self.state[w] for w in weights]
            exp_avgs, exp_avg_sqs, steps = ([state[name] for state in states] for name in (*MOMENTS, "step"))
            torch_fused_adamw(group, weights, exp_avgs, exp_avg_sqs, steps, self.grad_scale, self.found_inf)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for group in self.param_groups:
            for w in group["params"]:
                w.grad = None


class AdamW:
    """AdamW with decoupled weight decay; its state exists from the start, for checkpoints to load into."""

    def __init__(self, weights: Mapping[str, Tensor], train: TrainConfig):
        """``weights`` may be empty: a pipeline rank whose parameters are all frozen only counts the updates."""
        self.weights = weights
        """This rank's float32 shards by parameter name, updated in place."""
        device = next((w.device for w in weights.values()), None)
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        """Steps that were not skipped. Each weight also has its own count: it may lack a gradient in some steps."""
        decayed = [w for w in weights.values() if w.dim() >= 2]
        not_decayed = [w for w in weights.values() if w.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": train.weight_decay},
            {"params": not_decayed, "weight_decay": 0.0},
        ]
        self._adamw = _TorchAdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps)
        moments = self._make_moments()
        for w in weights.values():
            self._state_of(w).update({"step": torch.zeros((), dtype=torch.float32, device=w.device), **moments[w]})

    def step(self, lr: float | Tensor, skip: Tensor | None = None, scale: Tensor | None = None) -> None:
        """Update every weight by its gradient, then drop the gradients.

        Where ``skip`` (0-dim, float32, on the weights' device) is 1 nothing is updated: neither weights nor moments nor
        step counts; the host does not wait for its value. Gradients are divided by ``scale``.
        """
        self._count_update(skip)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._update(scale, skip)
        self._adamw.zero_grad()

    def _count_update(self, skip: Tensor | None) -> None:
        if skip is None:
            self.updates += 1
        else:
            self.updates = self.updates.to(skip.device) + (1 - skip)

    def _make_moments(self) -> dict[Tensor, dict[str, Tensor]]:
        """Zeros for each weight, on its device."""
        return {
            w: {moment: torch.zeros_like(w, memory_format=torch.preserve_format) for moment in MOMENTS}
            for w in self.weights.values()
        }

    def _update(self, scale: Tensor | None, skip: Tensor | None) -> None:
        # torch's own gradient scaler passes both to a fused optimizer as attributes, too.
        vars(self._adamw).update(grad_scale=scale, found_inf=skip)
        self._adamw.step()

    @property
    def state(self) -> dict[str, Tensor]:
        """``{moment}/{parameter}`` -> this rank's shard, laid out as the parameter is; an alias to load into."""
        weights = self.weights.items()
        return {f"{moment}/{name}": self._state_of(w)[moment] for moment in MOMENTS for name, w in weights}

    @property
    def steps(self) -> int:
        """Steps that were not skipped (synchronises with the device)."""
        return int(self.updates.item())

    @steps.setter
    def steps(self, steps: int) -> None:
        self.updates.fill_(steps)
        for w in self.weights.values():
            self._state_of(w)["step"].fill_(steps)

    def _state_of(self, weight: Tensor) -> dict[str, Any]:
        return self._adamw.state[weight]


class FusedAdamW(AdamW):
    """AdamW that also clips the gradients and writes the compute-type copies, in one pass over the weights."""

    def __init__(self, masters: Masters, train: TrainConfig):
        super().__init__(masters.local, train)
        self._masters, self._train = masters, train
        sample = next(iter(masters.local.values()))
        self._kernel = choose("adamw", sample.device.type, sample.dtype)
        self._steps_P = torch.zeros(len(masters.local), device=sample.device)
        """Adam's step count of each weight; those in the state are views of it."""
        for w, step in zip(masters.local.values(), self._steps_P, strict=True):
            self._state_of(w)["step"] = step
        decay = [train.weight_decay if w.dim() >= 2 else 0.0 for w in masters.local.values()]
        self._decay_P = torch.tensor(decay, dtype=torch.float64, device=sample.device)
        self._one = torch.ones((), dtype=sample.dtype, device=sample.device)
        self._zero = torch.zeros((), device=sample.device)

    @torch.no_grad()
    def step(
        self, lr: float | Tensor, skip: Tensor | None = None, scale: Tensor | None = None, clip: Tensor | None = None
    ) -> None:
        """As :meth:`AdamW.step`; multiplies the gradients by ``clip`` first and writes the compute-type copies."""
        t, grad_tensors = self._train, self._masters.gradient_holders
        self._count_update(skip)
        skip, factor = self._zero if skip is None else skip, self._one if clip is None else clip
        factor = (factor if scale is None else factor / scale).to(self._one.dtype)
        weights = [
            ParameterState(
                grad, w.detach(), self._state_of(w)["exp_avg"], self._state_of(w)["exp_avg_sq"], self._copy(name)
            )
            for name, w in self.weights.items()
            if (grad := grad_tensors[name].grad) is not None
        ]
        steps_P, decay_P = self._steps_P, self._decay_P
        if len(weights) == len(self.weights):
            steps_P += 1 - skip
        else:  # a weight without a gradient does not count this step
            with_grad = [i for i, tensor in enumerate(grad_tensors.values()) if tensor.grad is not None]
            steps_P[with_grad] += 1 - skip
            steps_P, decay_P = steps_P[with_grad], decay_P[with_grad]
        # In a skipped step a count may still be 0 and its rates NaN: nothing reads them.
        coefficients = step_sizes(steps_P, decay_P, self._one.dtype, lr=lr, beta1=t.beta1, beta2=t.beta2)
        self._kernel(weights, *coefficients, factor, skip, beta1=t.beta1, beta2=t.beta2, eps=t.eps)
        for tensor in grad_tensors.values():
            tensor.grad = None

    def _copy(self, name: str) -> Tensor | None:
        copy = self._masters.copies.get(name)
        return None if copy is None else copy.detach()


@dataclass(frozen=True)
class Bucket:
    """Weights whose moments are contiguous in pinned host memory."""

    weights: list[Tensor]
    host: Tensor
    """First all of m, then all of v."""

    def moments(self, flat: Tensor) -> list[list[Tensor]]:
        """[m, v], each a list of views of ``flat``, one per weight; ``flat`` is laid out as :attr:`host`."""
        sizes = [w.numel() for w in self.weights]
        halves = flat[: self.host.numel()].view(len(MOMENTS), self.host.numel() // len(MOMENTS))
        return [
            [part.view(w.shape) for part, w in zip(half.split(sizes), self.weights, strict=True)] for half in halves
        ]


class OffloadedAdamW(AdamW):
    """:class:`AdamW` with ``state`` in host memory; bitwise equal."""

    def __init__(self, weights: Mapping[str, Tensor], train: TrainConfig, bucket_bytes: int = BUCKET_BYTES):
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        super().__init__(weights, train)
        self._group_of = {w: group for group in self._adamw.param_groups for w in group["params"]}
        largest = max(bucket.host.numel() for bucket in self._buckets)
        sample = self._buckets[0].weights[0]
        self._on_gpu = sample.is_cuda
        if self._on_gpu:
            self._staging = [torch.empty(largest, dtype=sample.dtype, device=sample.device) for _ in range(3)]
            self._h2d, self._d2h = torch.cuda.Stream(sample.device), torch.cuda.Stream(sample.device)
            # The caching allocator may have taken the buffers from memory that the current stream still uses.
            self._h2d.wait_stream(torch.cuda.current_stream(sample.device))
            self._copied_out = [torch.cuda.Event() for _ in self._staging]

    @property
    def state(self) -> dict[str, Tensor]:
        """``{moment}/{parameter}`` -> this rank's shard in host memory (waits for the copies)."""
        if self._on_gpu:
            self._d2h.synchronize()
        return super().state

    def _make_moments(self) -> dict[Tensor, dict[str, Tensor]]:
        """Zeros for each weight, in buckets of host memory."""
        all_moments: dict[Tensor, dict[str, Tensor]] = {}
        for weights in self._group_into_buckets():
            sample, elements = weights[0], len(MOMENTS) * sum(w.numel() for w in weights)
            bucket = Bucket(weights, torch.zeros(elements, dtype=sample.dtype, pin_memory=sample.is_cuda))
            self._buckets.append(bucket)
            all_moments |= {
                w: dict(zip(MOMENTS, moments, strict=True))
                for w, *moments in zip(weights, *bucket.moments(bucket.host), strict=True)
            }
        return all_moments

    def _group_into_buckets(self) -> list[list[Tensor]]:
        """The weights in order, a new bucket whenever the next one would exceed its size."""
        groups: list[list[Tensor]] = []
        filled = 0
        for w in self.weights.values():
            size = len(MOMENTS) * w.numel() * w.element_size()
            if not groups or filled + size > self._bucket_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(w)
            filled += size
        return groups

    def _update(self, scale: Tensor | None, skip: Tensor | None) -> None:
        if not self._on_gpu:
            for bucket in self._buckets:
                self._update_bucket(bucket, bucket.host, scale, skip)
            return
        compute = torch.cuda.current_stream(self._h2d.device)
        self._h2d.wait_stream(self._d2h)  # the last step's moments must be in host memory
        self._prefetch(0)
        for i, bucket in enumerate(self._buckets):
            staged = self._staging[i % 3]
            compute.wait_stream(self._h2d)
            if i + 1 < len(self._buckets):
                self._prefetch(i + 1)
            self._update_bucket(bucket, staged, scale, skip)
            self._d2h.wait_stream(compute)
            with torch.cuda.stream(self._d2h):
                bucket.host.copy_(staged[: bucket.host.numel()], non_blocking=True)
            self._copied_out[i % 3].record(self._d2h)

    def _prefetch(self, i: int) -> None:
        """Copy bucket ``i`` to its staging buffer, once that buffer's previous bucket is back on the host."""
        host = self._buckets[i].host
        self._h2d.wait_event(self._copied_out[i % 3])
        with torch.cuda.stream(self._h2d):
            self._staging[i % 3][: host.numel()].copy_(host, non_blocking=True)

    def _update_bucket(self, bucket: Bucket, flat: Tensor, scale: Tensor | None, skip: Tensor | None) -> None:
        """AdamW on the weights of a bucket, whose moments are in ``flat``."""
        exp_avgs, exp_avg_sqs = bucket.moments(flat)
        for group in self._adamw.param_groups:
            index = [i for i, w in enumerate(bucket.weights) if self._group_of[w] is group and w.grad is not None]
            weights = [bucket.weights[i] for i in index]
            steps = [self._state_of(w)["step"] for w in weights]
            torch_fused_adamw(
                group, weights, [exp_avgs[i] for i in index], [exp_avg_sqs[i] for i in index], steps, scale, skip
            )

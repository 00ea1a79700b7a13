"""Whether the weights of a model fit into memory, checked before any is allocated or read."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from colonnade.config import ModelConfig, Plan, WeightGroup, Weights, size
from colonnade.config.feature_checks import check_quantised
from colonnade.errors import CapacityError, ColonnadeError
from colonnade.model.moe.expert_offload import device_bytes
from colonnade.model.transformer import Transformer
from colonnade.model.weight_only_quant import kept_bytes
from colonnade.parallel.axis import Axes, Axis, ExpertAxes
from colonnade.parallel.device_memory import USABLE_FRACTION, free_host_bytes, usable_bytes


@dataclass(frozen=True)
class WeightMemory:
    """The weights of one rank, and how they are kept."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    plan: Plan = Plan()
    resident: int | None = None
    """Layers whose experts are on the device; those of the others are in host memory."""
    weights: Weights = "stored"
    group: WeightGroup = 64
    beside: int = 0
    """What must be held on the device at the same time [bytes]."""

    def bytes(self) -> tuple[int, int]:
        """(on the device, on the host beside a GPU), of the rank that has most."""
        plan = self.plan
        grid = ExpertAxes(ep=Axis("ep", plan.ep), sh=Axis("sh", plan.sh))
        shape = Transformer(self.config, Axes(tp=Axis("tp", plan.tp), experts=grid), device="meta", dtype=self.dtype)
        weigh = partial(kept_bytes, weights=self.weights, group=self.group)
        whole, here = weigh(shape), device_bytes(shape, self.resident, weigh)
        if self.device.type == "cuda":
            return here + self.beside, whole - here
        buffers = here - device_bytes(shape, 0, weigh) if self.resident is not None else 0
        return whole + buffers + self.beside, 0

    def fits(self, free: int, host: int) -> bool:
        """Whether this is no more than ``free`` bytes on the device and ``host`` bytes on the host."""
        on_device, on_host = self.bytes()
        return on_device <= free and on_host <= host

    def problem(self, source: str) -> CapacityError | None:
        """What is to be raised, with remedies that are enough, when the weights of ``source`` do not fit."""
        free, host = usable_bytes(self.device), int(USABLE_FRACTION * free_host_bytes())
        return None if self.fits(free, host) else self.refusal(source, free, host)

    def check(self, source: str) -> None:
        """Raise :class:`CapacityError` when the weights of ``source`` do not fit."""
        if (problem := self.problem(source)) is not None:
            raise problem

    def refusal(self, source: str, free: int, host: int) -> CapacityError:
        """What is said of ``source``, for which there is too little memory."""
        on_device, on_host = self.bytes()
        host_short = on_device <= free and on_host > host
        short, there, where = (on_host, host, "host") if host_short else (on_device, free, self.device.type)
        remedies = [
            f"{flags} ({size(other.bytes()[0])})"
            for flags, other in self._others()
            if other.fits(free, host) and other.bytes()[host_short] < short
        ]
        enough = f"enough would be: {', '.join(remedies)}" if remedies else "use a smaller model, or a larger machine"
        return CapacityError(
            f"{source} does not fit: it takes {size(short)} of a rank's memory ({where}), and {size(there)} is "
            f"free; nothing was read; {enough}"
        )

    def _others(self) -> list[tuple[str, "WeightMemory"]]:
        """The same model kept otherwise, where it can be; (flags, how)."""
        found: list[tuple[str, WeightMemory]] = []
        if self.dtype.itemsize > 2:
            found.append(("--dtype bfloat16", replace(self, dtype=torch.bfloat16)))
        if self.weights == "stored" and not self.beside:
            kinds: tuple[Weights, ...] = ("int8", "int4")
            found += [(f"--serve.weights {kind} of generate and serve", replace(self, weights=kind)) for kind in kinds]
        if self.device.type == "cuda":  # ranks of one CPU host share its memory, and so do its waiting experts
            if self.config.moe is not None and self.resident is None and self.config.expert_layers > 2:
                found.append(("--experts.resident 2", replace(self, resident=2)))
            for tp in (2, 4, 8):
                flags, plan = f"--plan.tp {tp}", self.plan.but(tp=max(tp, self.plan.tp), ep=1, sh=1)
                if self.config.moe is not None:
                    flags, plan = f"{flags} --plan.ep {tp}", plan.but(ep=plan.tp)
                if tp > self.plan.tp:
                    found.append((f"{flags} on as many GPUs", replace(self, plan=plan)))
        return [(flags, other) for flags, other in found if other.possible]

    @property
    def possible(self) -> bool:
        """Whether the model can be laid out and kept so."""
        try:
            self.plan.check(self.config)
            check_quantised(self.config, self.weights, self.group, self.plan.tp, self.plan.sh)
        except ColonnadeError:
            return False
        return True

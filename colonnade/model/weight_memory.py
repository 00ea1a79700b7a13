"""Checks that the weights of a model fit into memory, before any is allocated or read."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from colonnade.config import ModelConfig, Plan, WeightFormat, WeightGroup, format_bytes
from colonnade.config.feature_checks import check_quantised
from colonnade.errors import CapacityError, ColonnadeError
from colonnade.model.moe.expert_offload import device_bytes
from colonnade.model.transformer import Transformer
from colonnade.model.weight_only_quant import Formats, weight_bytes_as
from colonnade.parallel.axis import Axes, Axis, ExpertAxes
from colonnade.parallel.device_memory import USABLE_FRACTION, free_host_bytes, usable_bytes


@dataclass(frozen=True)
class WeightMemory:
    """The weights of one rank, and the format in which they are stored."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    plan: Plan = Plan()
    layers_on_device: int | None = None
    """Number of layers with their experts on the device; the others' are in host memory."""
    weights: WeightFormat = "stored"
    group: WeightGroup = 64
    formats: Formats | None = None
    """The formats of a checkpoint's quantised matrices, if they are kept (``weights`` is stored)."""
    reserved: int = 0
    """Other memory needed on the device at the same time [bytes]."""

    def bytes(self) -> tuple[int, int]:
        """(on the device, on a GPU's host), of the rank with most weights."""
        plan = self.plan
        grid = ExpertAxes(ep=Axis("ep", plan.ep), etp=Axis("etp", plan.etp))
        shape = Transformer(self.config, Axes(tp=Axis("tp", plan.tp), experts=grid), device="meta", dtype=self.dtype)
        count = partial(weight_bytes_as, weights=self.weights, group=self.group, formats=self.formats)
        whole, here = count(shape), device_bytes(shape, self.layers_on_device, count)
        if self.device.type == "cuda":
            return here + self.reserved, whole - here
        buffers = here - device_bytes(shape, 0, count) if self.layers_on_device is not None else 0
        return whole + buffers + self.reserved, 0

    def fits(self, free: int, host: int) -> bool:
        """Whether the weights take at most ``free`` bytes on the device and ``host`` bytes on the host."""
        on_device, on_host = self.bytes()
        return on_device <= free and on_host <= host

    def problem(self, source: str) -> CapacityError | None:
        """The error, with sufficient remedies, if the weights of ``source`` do not fit."""
        free, host = usable_bytes(self.device), int(USABLE_FRACTION * free_host_bytes())
        return None if self.fits(free, host) else self.refusal(source, free, host)

    def check(self, source: str) -> None:
        """Raise :class:`CapacityError` when the weights of ``source`` do not fit."""
        if (problem := self.problem(source)) is not None:
            raise problem

    def refusal(self, source: str, free: int, host: int) -> CapacityError:
        """The error for ``source`` with so much free memory, with sufficient remedies."""
        on_device, on_host = self.bytes()
        host_short = on_device <= free and on_host > host
        short, available, where = (on_host, host, "host") if host_short else (on_device, free, self.device.type)
        remedies = [
            f"{flags} ({format_bytes(other.bytes()[0])})"
            for flags, other in self._alternatives()
            if other.fits(free, host) and other.bytes()[host_short] < short
        ]
        enough = "use a smaller model, or a larger machine"
        if remedies:
            enough = f"any of these would be enough: {', '.join(remedies)}"
        return CapacityError(
            f"{source} does not fit: it takes {format_bytes(short)} of a rank's memory ({where}), and "
            f"{format_bytes(available)} is free; nothing was read; {enough}"
        )

    def _alternatives(self) -> list[tuple[str, "WeightMemory"]]:
        """The same weights in other formats and layouts that are possible: (flags, weights)."""
        alternatives: list[tuple[str, WeightMemory]] = []
        if self.dtype.itemsize > 2:
            alternatives.append(("--dtype bfloat16", replace(self, dtype=torch.bfloat16)))
        if self.weights == "stored" and not self.reserved and not self.formats:
            kinds: tuple[WeightFormat, ...] = ("int8", "int4")
            alternatives += [
                (f"--serve.weights {kind} of generate and serve", replace(self, weights=kind)) for kind in kinds
            ]
        if self.device.type == "cuda":  # ranks of one CPU host share its memory, offloaded experts too
            if self.config.moe is not None and self.layers_on_device is None and self.config.expert_layers > 2:
                alternatives.append(("--experts.layers_on_device 2", replace(self, layers_on_device=2)))
            for tp in (2, 4, 8):
                flags, plan = f"--plan.tp {tp}", self.plan.replace(tp=max(tp, self.plan.tp), ep=1, etp=1)
                if self.config.moe is not None:
                    flags, plan = f"{flags} --plan.ep {tp}", plan.replace(ep=plan.tp)
                if tp > self.plan.tp:
                    alternatives.append((f"{flags} on as many GPUs", replace(self, plan=plan)))
        return [(flags, other) for flags, other in alternatives if other.is_possible]

    @property
    def is_possible(self) -> bool:
        """Whether the model supports this plan and format."""
        try:
            self.plan.check(self.config)
            check_quantised(self.config, self.weights, self.group, self.plan.tp, self.plan.etp)
        except ColonnadeError:
            return False
        return True

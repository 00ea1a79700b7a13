"""Key/value cache: pages of a fixed number of tokens, one pair of pools per layer (Kwon et al., arXiv 2309.06180)."""

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.config import CacheFormat, ModelConfig
from colonnade.kernels.attention import cache_write
from colonnade.kernels.registry import choose
from colonnade.parallel.axis import SOLO_AXES, Axes


@dataclass(frozen=True)
class Pools:
    """One layer of a cache."""

    k_PpKH: Tensor
    v_PpKH: Tensor
    """``k_PpKH`` itself, for latent attention."""
    value_width: int | None = None
    """How many elements of a cached vector are its value; None: that of ``v_PpKH``."""
    scales_Pp2: Tensor | None = None
    """Scales of 8-bit latents (:mod:`~colonnade.kernels.attention.cache_write`)."""

    def write(self, slots_T: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> None:
        """Write new tokens into their slots (page · page_tokens + offset)."""
        if self.scales_Pp2 is not None:
            store = choose("mla_cache_write", k_TkH.device.type, k_TkH.dtype)
            store(k_TkH[:, 0], slots_T, self.value_width, self.k_PpKH, self.scales_Pp2)
            return
        cache_write.write_kv(self.k_PpKH, slots_T, k_TkH)
        if self.v_PpKH is not self.k_PpKH:
            cache_write.write_kv(self.v_PpKH, slots_T, v_TkH)

    def round_trip(self, k_TkH: Tensor, v_TkH: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of new tokens with the rounding of the cache, as if written and read."""
        if self.scales_Pp2 is None:
            if self.k_PpKH.element_size() > 1:
                return k_TkH, v_TkH
            k_TkH, v_TkH = (cache_write.to_cache_dtype(x, self.k_PpKH.dtype).to(x.dtype) for x in (k_TkH, v_TkH))
            return k_TkH, v_TkH
        assert self.value_width is not None, "scales are for latents"
        values_TH, scales_T2 = cache_write.quantise_latents(
            k_TkH[:, 0], self.value_width, cache_write.latent_kind(self.k_PpKH)
        )
        k_T1H = cache_write.dequantise_latents(values_TH[:, None], scales_T2, self.value_width, k_TkH.dtype)
        return k_T1H, k_T1H

    def read(self, slots_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(k_SkH, v_SkH) of these slots, in ``dtype``."""
        if self.scales_Pp2 is None:
            k_SkH, v_SkH = (cache_write.read_kv(pool, slots_S, dtype) for pool in (self.k_PpKH, self.v_PpKH))
            return k_SkH, v_SkH[..., : self.value_width]
        assert self.value_width is not None, "scales are for latents"
        pools = self.k_PpKH.flatten(0, 1), self.scales_Pp2.flatten(0, 1)
        k_SkH = cache_write.gather_latents(*pools, slots_S, self.value_width, dtype)
        return k_SkH, k_SkH[..., : self.value_width]

    @property
    def kernel_arguments(self) -> dict[str, object]:
        """Arguments of paged attention other than the pools themselves."""
        arguments: dict[str, object] = {"values": self.value_width}
        return arguments if self.scales_Pp2 is None else arguments | {"scales_Pp2": self.scales_Pp2}


class KVCache:
    """``k[i]`` and ``v[i]`` of layer i: (pages, page_tokens, K/tp, H). The scheduler assigns pages to requests.

    Latent attention stores one vector for all heads, on every rank, which is key and value in one (``v[i] is k[i]``);
    with an 8-bit ``kind`` it has two float32 scales per token in ``scales[i]``. Keys and values of other attention may
    be float8, without scales (:mod:`~colonnade.kernels.attention.cache_write`).
    """

    def __init__(
        self,
        config: ModelConfig,
        axes: Axes = SOLO_AXES,
        *,
        pages: int,
        page_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kind: CacheFormat = "stored",
    ):
        assert kind != "int8" or config.latent, "int8 needs the scales that latents have"
        self.pages, self.page_tokens = pages, page_tokens
        self._shape = (pages, page_tokens, *_head_shape(config, axes))
        self._dtype, self._device, self._layers = cache_write.DTYPES.get(kind, dtype), device, config.layers
        self._has_values, self._has_scales = not config.latent, kind != "stored" and config.latent is not None
        self.value_width = config.latent.kv_rank if config.latent else None
        """How many elements of a cached vector are its value; None: that of ``v``."""
        self._fill(pages)

    def _fill(self, pages: int) -> None:
        # Zeros, not empty: a masked-out key times a weight of zero must not be NaN.
        def pools(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
            return [_zeros((pages, *shape), dtype, self._device) for _ in range(self._layers)]

        self.k = pools(self._shape[1:], self._dtype)
        self.v = pools(self._shape[1:], self._dtype) if self._has_values else self.k
        two = (self.page_tokens, cache_write.SCALES_PER_TOKEN)
        self.scales = pools(two, torch.float32) if self._has_scales else None

    def release(self) -> None:
        """Free the pools' memory; their contents are lost."""
        self._fill(0)

    def allocate(self) -> None:
        """Allocate the pools again, at other addresses, if they were released."""
        if not len(self.k[0]):
            self._fill(self.pages)

    def at(self, layer: int) -> Pools:
        """The pools of one layer."""
        scales = None if self.scales is None else self.scales[layer]
        return Pools(self.k[layer], self.v[layer], self.value_width, scales)

    @staticmethod
    def bytes_per_page(
        config: ModelConfig, axes: Axes, page_tokens: int, dtype: torch.dtype, kind: CacheFormat = "stored"
    ) -> int:
        """Memory of one page over all layers on one rank [bytes]."""
        heads, width = _head_shape(config, axes)
        token = heads * width * cache_write.DTYPES.get(kind, dtype).itemsize
        if kind != "stored" and config.latent:
            token += cache_write.SCALES_PER_TOKEN * torch.float32.itemsize
        return (1 if config.latent else 2) * config.layers * page_tokens * token

    @property
    def bytes(self) -> int:
        """Memory of the whole cache on this rank [bytes]."""
        pools = self.k if self.v is self.k else (*self.k, *self.v)
        return sum(t.nbytes for t in (*pools, *(self.scales or ())))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on a CPU the system provides pages of memory when they are first written.

    ``calloc``, which torch and numpy use, takes what loading has freed, and writes zeros to all of that. Raises
    MemoryError if the system refuses the memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size:,} bytes for a cache: {error}") from None
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def _head_shape(config: ModelConfig, axes: Axes) -> tuple[int, int]:
    """(heads, width) of a token's cached vectors in one layer on one rank."""
    if config.latent:
        return 1, config.latent.kv_rank + config.latent.rope_width
    return config.kv_heads // axes.tp.size, config.head_width

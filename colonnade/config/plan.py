"""A parallel layout as data: how many ranks share what, checked before any process starts.

Ranks are numbered with ``tp`` innermost (rank = data · tp + tensor): tensor-parallel peers exchange activations in
every block, so they are neighbours on the fastest links.
"""

from pydantic import Field

from colonnade.config.base import Config
from colonnade.config.model import ModelConfig, divisors
from colonnade.errors import PlanError


class Plan(Config):
    """How one model is laid over processes."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel: ranks that share each layer's heads, hidden width and vocabulary (Megatron-LM)."""
    dp: int = Field(default=1, ge=1)
    """Data parallel: ranks that hold shards of the weights (FSDP) and read different samples."""

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.tp * self.dp

    def check(self, model: ModelConfig) -> None:
        """Raise :class:`PlanError` when ``model`` cannot be laid out so; say what would do."""
        if model.kv_heads % self.tp:
            fits = [str(d) for d in divisors(model.kv_heads)]
            choice = fits[0] if len(fits) == 1 else f"{', '.join(fits[:-1])} or {fits[-1]}"
            raise PlanError(f"{model.kv_heads} key/value heads do not divide over tp={self.tp}; use tp of {choice}")
        for what, size in (("vocabulary rows", model.vocab_size), ("hidden units", model.ffn_width)):
            if -(-size // self.tp) * (self.tp - 1) >= size:
                raise PlanError(
                    f"{size} {what} leave the last of {self.tp} tensor-parallel ranks empty; use a lower tp"
                )

    def check_world(self, world: int) -> None:
        """Raise :class:`PlanError` unless exactly ``world`` processes run."""
        if world != self.world:
            other = "" if world % self.tp else f", or set --plan.dp {world // self.tp}"
            raise PlanError(
                f"the plan (tp={self.tp}, dp={self.dp}) needs {self.world} processes but {world} were started; "
                f"start {self.world}{other}"
            )

    def table(self, model: ModelConfig) -> list[tuple[str, str, str]]:
        """Rows (axis, ranks, what each rank holds) for people to read."""
        return [
            ("tp", str(self.tp), f"{model.heads // self.tp} of {model.heads} query heads, "
             f"{model.kv_heads // self.tp} of {model.kv_heads} key/value heads, "
             f"<= {-(-model.ffn_width // self.tp)} of {model.ffn_width} hidden units, "
             f"<= {-(-model.vocab_size // self.tp)} of {model.vocab_size} vocabulary rows"),
            ("dp", str(self.dp), f"1/{self.dp} of each parameter and of every batch"),
            ("world", str(self.world), f"{model.parameters / self.world / 1e6:.2f} M of "
             f"{model.parameters / 1e6:.2f} M parameters"),
        ]  # fmt: skip

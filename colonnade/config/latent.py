"""Multi-head latent attention: keys and values of all heads made of one short vector a token (arXiv 2405.04434)."""

from pydantic import Field

from colonnade.config.base import MOST_SIZE, Config


class LatentConfig(Config):
    """How a token is compressed; the model's head_width is that of queries and keys, rotary part included."""

    kv_rank: int = Field(gt=0, le=MOST_SIZE)
    """Width of the vector that keys and values of all heads are made of."""
    rope_width: int = Field(gt=0, le=MOST_SIZE)
    """Of each query and key head, how much at its end is turned by the position; the keys' is one for all heads."""
    v_width: int = Field(gt=0, le=MOST_SIZE)
    """Width of a value head."""
    q_rank: int = Field(default=0, ge=0, le=MOST_SIZE)
    """Width of the vector that queries of all heads are made of; 0: they are made of the token itself."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Added to the variance of the two compressed vectors."""

    def projections(self, width: int, heads: int, head_width: int) -> int:
        """Numbers in the matrices of one layer of a model of these sizes."""
        q = (width + heads * head_width) * self.q_rank if self.q_rank else width * heads * head_width
        up = head_width - self.rope_width + self.v_width
        kv = width * (self.kv_rank + self.rope_width) + self.kv_rank * heads * up
        return q + kv + heads * self.v_width * width

    def vectors(self, *, bias: bool) -> int:
        """Numbers in the norms and biases of the two compressed vectors."""
        return (1 + bias) * (self.q_rank + self.kv_rank) + bias * self.rope_width

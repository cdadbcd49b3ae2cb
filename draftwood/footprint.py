"""What a forward has to compute and to read, counted from a model's sizes alone: the latency prior's input."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.latency import Work

ATTENTION_LAUNCHES = 8  # of one more request in a layer


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a decoder-only model as it runs."""

    weight_bytes: float  # that a wide forward reads
    itemsize: float  # bytes of one weight
    hidden_size: int
    layers: int
    kv_bytes: float  # of one token in the cache
    launches: int  # operators of one forward
    expert_bytes: float = 0.0  # of the weights, those of experts, of which a token runs through `expert_share`
    expert_share: float = 1.0
    attention_size: int = 0  # query heads × their width; 0, as in older traces: the hidden size
    near_layers: int = 0  # that look back over a `window` of tokens alone; the cache holds the others for them, too
    window: int = 0

    def work(self, n_tokens: int, context: int, requests: int = 1) -> Work:
        """What verifying `n_tokens` (roots included) of some requests, each behind `context` tokens, takes at least.

        Of experts, each token is taken to choose its own, evenly.
        """
        near = min(context, self.window) * self.near_layers
        seen = (near + context * (self.layers - self.near_layers)) / self.layers  # of the context, by a layer
        pairs = n_tokens * (seen + n_tokens / requests)  # a token sees its own request's
        attention = 4 * pairs * (self.attention_size or self.hidden_size) * self.layers
        idle = self.expert_bytes * (1 - self.expert_share)  # of one token's forward
        unread = self.expert_bytes * (1 - self.expert_share) ** n_tokens
        return Work(
            flops=2 * n_tokens * (self.weight_bytes - idle) / self.itemsize + attention,
            bytes=self.weight_bytes - unread + (requests * seen + 2 * n_tokens) * self.kv_bytes,
            launches=self.launches + (requests - 1) * ATTENTION_LAUNCHES * self.layers,
        )

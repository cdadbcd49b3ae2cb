"""What a forward has to compute and to read, counted from a model's sizes alone. The latency prior is made from it."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.latency import Work

ATTENTION_LAUNCHES = 8  # operators that one more request adds in a layer


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a decoder-only model as it runs."""

    weight_bytes: float  # that a wide forward reads
    itemsize: float  # bytes of one weight
    hidden_size: int
    layers: int
    kv_bytes: float  # of one token in the cache
    launches: int  # operators of one forward
    expert_bytes: float = 0.0  # part of `weight_bytes` that are experts'; a token runs through `expert_share` of it
    expert_share: float = 1.0
    attention_size: int = 0  # query heads × their width; 0, as in older traces: the hidden size
    near_layers: int = 0  # layers that look back over a `window` of tokens alone; the cache keeps all others, too
    window: int = 0

    def work(self, n_tokens: int, context: int, requests: int = 1) -> Work:
        """What verifying `n_tokens` (roots included) of some requests, each behind `context` tokens, takes at least.

        Each token is assumed to choose its experts independently, each of them equally often.
        """
        near = min(context, self.window) * self.near_layers
        seen = (near + context * (self.layers - self.near_layers)) / self.layers  # tokens of context, a layer's mean
        pairs = n_tokens * (seen + n_tokens / requests)  # a token sees its own request's
        attention = 4 * pairs * (self.attention_size or self.hidden_size) * self.layers
        idle = self.expert_bytes * (1 - self.expert_share)  # experts that one token leaves out
        unread = self.expert_bytes * (1 - self.expert_share) ** n_tokens
        return Work(
            flops=2 * n_tokens * (self.weight_bytes - idle) / self.itemsize + attention,
            bytes=self.weight_bytes - unread + (requests * seen + 2 * n_tokens) * self.kv_bytes,
            launches=self.launches + (requests - 1) * ATTENTION_LAUNCHES * self.layers,
        )

"""EAGLE-3 (arXiv 2503.01840) as a module that learns, by training-time test, and its checkpoint in the authors' form.

Row i of the layer is the embedding of token i + 1 beside the feature of token i. In the first step features are the
target's; in each later step they are the layer's own outputs of the step before, as in drafting. Every row sees the
first step's rows up to itself, and its own rows of later steps. A block is what one row predicts in B - 1 steps; a text
has a block for each of its rows, those of the prompt included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from draftwood.drafters import mark
from draftwood.drafters.dflash import rotary_embedding
from draftwood.drafters.dflash_config import DFlashConfig, parse_config
from draftwood.errors import BadInput
from draftwood.lean import ARCHITECTURES
from draftwood.rotary import Rotary, rotate
from draftwood.target import Target
from draftwood.train.attention import Layout
from draftwood.train.files import WEIGHTS, write_tensors, write_text
from draftwood.train.loss import Head
from draftwood.train.model import Mlp, Norm, TrainableDFlash
from draftwood.train.start import BEGINNINGS, plain_weight
from draftwood.universal import decoder_layers

COPIED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "vocab_size", "max_position_embeddings", "dtype", "bos_token_id",
    "eos_token_id",
)  # fmt: skip


class Attention(nn.Module):
    """Attention that reads embedding and feature side by side."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)
        self.head_dim, self.groups = config.head_dim, config.num_heads // config.num_kv_heads

    def parts(self, x: Tensor, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[M, H, D]`; heads that share a key have it repeated."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate(part, *rotary.at(positions)).to(v.dtype) for part in (q, k))
        return q, k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)


class Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.hidden_norm = Norm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)


class TrainableEagle3(nn.Module):
    """The layer and `fc`; embedding and head stay the target's, frozen. Parameters have the authors' names."""

    markov = None  # each row reads the token before it anyway

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.tap_width, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = Norm(config.hidden_size, config.norm_eps)

    def forward(self, embedded: Tensor, taps: Sequence[Tensor], layout: Layout) -> Tensor:
        """Final hidden states `[M, B - 1, hidden]`; the blocks of each text begin at its places 1, 2, 3 …

        Parameters
        ----------
        embedded: `[M * B, hidden]`, the target's embeddings of the block tokens, which are all shown
        taps: for each text `[T, taps * hidden]`, outputs of the tapped target layers
        """
        blocks = embedded.unflatten(0, (-1, layout.size)).split(layout.counts)
        rotary = Rotary(rotary_embedding(self.config).to(embedded.device), self.norm.weight.detach())
        rotary.reserve(max(layout.lengths) + layout.size)
        texts = [self._text(block, tap[: len(block)], rotary) for block, tap in zip(blocks, taps, strict=True)]
        out: Tensor = self.norm(torch.cat(texts))
        return out

    def _text(self, embedded: Tensor, taps: Tensor, rotary: Rotary) -> Tensor:
        """`[M, B - 1, hidden]` before the final norm, of one text's blocks `[M, B, hidden]`."""
        layer, size = self.midlayer, len(embedded)
        hidden = self.fc(taps.to(embedded.dtype))
        place = torch.arange(size, device=embedded.device)
        later = place[None, :] > place[:, None]
        keys, values, steps = [], [], []
        for step in range(embedded.shape[1] - 1):
            both = torch.cat([layer.input_layernorm(embedded[:, step]), layer.hidden_norm(hidden)], -1)
            q, k, v = layer.self_attn.parts(both, rotary, place + step)
            keys.append(k)
            values.append(v)
            hidden = hidden + layer.self_attn.o_proj(attend(q, keys, values, later))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            steps.append(hidden)
        return torch.stack(steps, 1)


Trainable: TypeAlias = TrainableDFlash | TrainableEagle3


def attend(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], later: Tensor) -> Tensor:
    """`[M, H * D]`: each row sees the first step's rows up to itself, and of later steps its own row."""
    scores = torch.einsum("mhd,nhd->hmn", q, keys[0]).masked_fill(later, -torch.inf)
    own = [(q * k).sum(-1).T[..., None] for k in keys[1:]]
    share = (torch.cat([scores, *own], -1) * q.shape[-1] ** -0.5).float().softmax(-1).to(q.dtype)
    seen = torch.einsum("hmn,nhd->mhd", share[..., : len(q)], values[0])
    for at, v in enumerate(values[1:], len(q)):
        seen = seen + share[..., at].T[..., None] * v
    return seen.flatten(1)


def start_eagle3(config: Mapping[str, Any], init: str, target: Target, seed: int) -> TrainableEagle3:
    """A drafter on the target's device, in float32. `init` is `target` or `random`. Raises BadInput for others."""
    if init not in BEGINNINGS:
        raise BadInput(f"--init {init}: the objective eagle3 begins from {' or '.join(BEGINNINGS)}.")
    torch.manual_seed(seed)
    model = TrainableEagle3(parse_config(config, "to be trained"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, config["initializer_range"])
        if init == "target":
            copy_last_layer(model, target)
    return model.to(target.device, torch.float32)


def copy_last_layer(model: TrainableEagle3, target: Target) -> None:
    """Copy the target's last layer to where features go in, and make `fc` the identity on the deepest tap."""
    hidden = model.config.hidden_size
    model.fc.weight.zero_()
    model.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
    if type(target.model).__name__ not in ARCHITECTURES:
        return
    theirs = dict(decoder_layers(target.model)[-1].named_modules())
    for name, part in model.midlayer.named_modules():
        weight = plain_weight(theirs.get(name))
        if not isinstance(part, (nn.Linear, nn.RMSNorm)) or weight is None:
            continue
        # Queries, keys and values read embedding and feature; the target's read what corresponds to the feature.
        mine = part.weight[:, hidden:] if name.endswith(("q_proj", "k_proj", "v_proj")) else part.weight
        if mine.shape == weight.shape:
            mine.copy_(weight)
    norms = plain_weight(theirs["input_layernorm"]), plain_weight(target.model.get_decoder().norm)
    for mine, weight in zip((model.midlayer.hidden_norm.weight, model.norm.weight), norms, strict=True):
        if weight is not None:
            mine.copy_(weight)


def export_eagle3(out: Path, model: TrainableEagle3, config: Mapping[str, Any], head: Head) -> None:
    """The folder as SafeAILab and SpecForge write theirs: the head's rows, and `d2t` and `t2d` where it is trimmed."""
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    tensors["lm_head.weight"] = head.weight.detach().to("cpu", torch.bfloat16)
    if head.tokens is not None:
        tokens = head.tokens.cpu()
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.isin(torch.arange(config["vocab_size"]), tokens)
    write_tensors(out / WEIGHTS, tensors, {"format": "pt"})
    trained = config["dflash_config"]
    published = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(head.weight),
        "tie_word_embeddings": False,
        mark.KEY: trained[mark.KEY],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": trained["target_layer_ids"],
            "thinking": trained["thinking"],
        },
        **{name: config[name] for name in COPIED},
    }
    write_text(out / "config.json", json.dumps(published, indent=2) + "\n")

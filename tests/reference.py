"""Slow truths and scripted parts that the tests share: models made in code, drafters that know or do not know."""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftwood.device.graphs import Graphs
from draftwood.drafters.base import Candidates, Placeable, Request
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.eagle3 import Eagle3Drafter
from draftwood.drafters.pooled import Pooled
from draftwood.latency import Work
from draftwood.noise import Ahead
from draftwood.pool_gain import Gain
from draftwood.target import Target
from draftwood.tree import Lattice, Tree

VOCAB = 97
ARCHITECTURES = {"": "DFlashDraftModel", "DFlash 2": "DFlash2DraftModel", "DSpark": "Qwen3DSparkModel"}
CODEBOOKS = ("predecessor", "successor")  # of DFlash 2's selector
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
SLIDING = dict(sliding_window=8)
EXPERTS = dict(num_experts_per_tok=2, experts_implementation="eager")  # grouped products know no float64

# Every family runs its real transformers code on random weights.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": dict(head_dim=16),
    "mistral": SLIDING,
    "gemma": dict(head_dim=8),
    "gemma2": dict(  # older transformers take SDPA by default, which knows no soft cap
        **SLIDING, query_pre_attn_scalar=8, head_dim=8, final_logit_softcapping=5.0, attn_implementation="eager"
    ),
    "gemma3_text": dict(**SLIDING, query_pre_attn_scalar=8, head_dim=8),
    "gemma4_text": dict(  # layers differ in the width of their heads
        **SLIDING,
        head_dim=8,
        global_head_dim=16,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "phi": {},
    "phi3": SLIDING,
    "gpt_neox": {},
    "gpt2": dict(n_embd=32, n_layer=3, n_head=4, n_positions=256),
    "olmo2": {},
    "cohere": dict(logit_scale=0.5),
    "cohere2": SLIDING,
    "granite": dict(logits_scaling=2.0),
    "starcoder2": SLIDING,
    "qwen3_sliding": dict(use_sliding_window=True, max_window_layers=1, **SLIDING),
    "qwen2_moe": dict(  # this one and the next tell their windows to their masks alone
        **SLIDING,
        **EXPERTS,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    "phimoe": dict(**SLIDING, **EXPERTS, num_local_experts=4),
    "olmoe": dict(**SLIDING, **EXPERTS, num_experts=4),  # and this one hands on a window that its masks do not have
}


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **changes: object):
    """A random model of a family, small enough to run in a millisecond, peaked enough to have opinions."""
    torch.manual_seed(seed)
    options = {**SHAPE, **FAMILIES[family], **changes}
    config = AutoConfig.for_model(family.removesuffix("_sliding"), **options)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():  # the usual initialisation leaves logits nearly flat
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(6)
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte: every text can be written."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 256, **{c: i for i, c in enumerate(alphabet)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


LEAN = ("llama", "qwen2", "qwen3", "mistral", "qwen3_sliding")
ON_PATHS = [*((family, "universal") for family in FAMILIES), *((family, "lean") for family in LEAN)]


def tiny_target(family: str = "llama", path: str = "auto", pack: bool = False, **options) -> Target:
    return Target(tiny_model(family, **options), f"tiny-{family}", path=path, pack=pack)


@torch.inference_mode()
def plain_logits(target: Target, tokens: list[int]) -> torch.Tensor:
    """The model's own logits [T, V], without cache, plan or our attention."""
    with target.plain_transformers() as model:
        return model(input_ids=torch.tensor([tokens], device=target.device)).logits[0]


@dataclass
class Scripted:
    """A drafter whose lattice comes from a function of the tokens so far. Keeps what any drafter must keep."""

    name: str
    tap_layers: tuple[int, ...] = ()
    max_depth: int = 6
    seen: list[list[int]] = field(default_factory=list)

    def open(self, capacity: int) -> list[int]:
        self.seen.append([])
        return self.seen[-1]

    def extend(self, state: list[int], tokens: list[int], taps: torch.Tensor | None) -> None:
        assert (taps is None) == (not self.tap_layers)
        assert taps is None or len(taps) == len(tokens)
        state.extend(tokens)

    def rewind(self, state: list[int], length: int) -> None:
        del state[length:]

    def draft(self, requests: list[Request]) -> list[Lattice | Tree]:
        return [self.propose([*r.state, r.root], r.width) for r in requests]

    def propose(self, tokens: list[int], width: int) -> Lattice | Tree:
        raise NotImplementedError

    def work(self, context: int) -> Work:
        return Work(0.0, 0.0, 1)


def lattice(tokens: np.ndarray, logits: np.ndarray) -> Lattice:
    """A proper lattice from candidate tokens and any scores: sorted, at most probability 1 a depth."""
    logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    order = np.argsort(-logp, axis=1, kind="stable")
    return Lattice(
        np.take_along_axis(tokens, order, 1).astype(np.int64),
        np.take_along_axis(logp, order, 1).astype(np.float32),
    )


@dataclass
class Truthful(Scripted):
    """Proposes a known text with high probability, among decoys; wrong at every `slip`-th position."""

    truth: list[int] = field(default_factory=list)
    vocab: int = VOCAB
    slip: int = 5

    def propose(self, tokens: list[int], width: int) -> Lattice:
        depth, width = self.max_depth, min(width, 4)
        rng = np.random.default_rng(len(tokens))
        rows, scores = [], []
        for d in range(depth):
            at = len(tokens) + d
            right = self.truth[at] if at < len(self.truth) else 0
            others = [t for t in rng.permutation(self.vocab).tolist() if t != right][: width - 1]
            best = 3.0 if (at % self.slip) else -3.0  # a slip: the right token is the least likely
            rows.append([right, *others])
            scores.append([best, *(-0.5 * k for k in range(1, width))])
        return lattice(np.array(rows), np.array(scores))


@dataclass
class Noisy(Scripted):
    """Random candidates with random scores."""

    vocab: int = VOCAB

    def propose(self, tokens: list[int], width: int) -> Lattice:
        rng = np.random.default_rng([len(tokens), tokens[-1]])
        width = min(width, self.vocab)
        rows = np.stack([rng.permutation(self.vocab)[:width] for _ in range(self.max_depth)])
        return lattice(rows, rng.normal(size=rows.shape))


@dataclass
class Hostile(Scripted):
    """Sure of nonsense: one repeated token at probability 1, the rest impossible; now and then nothing at all."""

    def propose(self, tokens: list[int], width: int) -> Lattice | Tree:
        if len(tokens) % 3 == 0:
            return Tree(np.array([tokens[-1]]), np.array([-1]), np.array([0]), np.ones(1, np.float32))
        rows = np.stack([np.roll(np.arange(width), -(len(tokens) % width))] * self.max_depth)
        logp = np.full(rows.shape, -np.inf, np.float32)
        logp[:, 0] = 0.0
        return Lattice(rows.astype(np.int64), logp)


@dataclass
class Branching(Scripted):
    """Gives a tree itself: two continuations of fixed tokens with conditional masses."""

    vocab: int = VOCAB

    def propose(self, tokens: list[int], width: int) -> Tree:
        a = (tokens[-1] + 1) % self.vocab
        b = (tokens[-1] + 2) % self.vocab
        return Tree(
            np.array([tokens[-1], a, b, a, b, a]),
            np.array([-1, 0, 0, 1, 1, 2]),
            np.array([0, 1, 1, 2, 2, 2]),
            np.array([1, 0.6, 0.3, 0.3, 0.2, 0.1], np.float32),
        )


@dataclass
class Tabled(Placeable):
    """A scripted drafter on a device: its proposals by the length of the text alone, from a table made on first use."""

    script: Scripted
    longest: int = 64  # tokens of a text; the last entry serves longer ones

    def __getattr__(self, name: str) -> object:
        return getattr(self.script, name)  # on the host it is the script itself

    def place(self, capacity: int) -> PlacedTable:
        return PlacedTable(self)


class PlacedTable:
    paired = 0

    def __init__(self, drafter: Tabled) -> None:
        self.max_depth = drafter.script.max_depth
        self._drafter, self._tables = drafter, {}
        self.taps: torch.Tensor | None = None  # by position, as DFlash would keep what it makes of them

    def extend(self, taps: torch.Tensor, start: torch.Tensor) -> None:
        if self.taps is None:
            self.taps = taps.new_zeros(2 * self._drafter.longest, taps.shape[1])
        self.taps.index_copy_(0, start + torch.arange(len(taps), device=start.device), taps)

    def draft(self, root: torch.Tensor, context: torch.Tensor, width: int, ahead: Ahead | None = None) -> Candidates:
        if width not in self._tables:
            self._tables[width] = [part.to(root.device) for part in self._table(width)]
        tokens, logp = self._tables[width]
        at = context.clamp(max=len(tokens) - 1)[None]  # a scalar index would wait for the device
        return Candidates(tokens[at][0], logp[at][0])

    def nbytes(self) -> int:
        return 0

    def _table(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._drafter.longest, self.max_depth, width
        tokens, logp = np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32)
        for length in range(self._drafter.longest):
            proposal = self._drafter.script.propose([0] * (length + 1), width)
            if isinstance(proposal, Lattice):  # a tree means that it proposes nothing
                tokens[length, :, : proposal.tokens.shape[1]] = proposal.tokens
                logp[length, :, : proposal.tokens.shape[1]] = proposal.logp
        return torch.from_numpy(tokens), torch.from_numpy(logp)


# Operators whose result a CUDA graph cannot hold: they wait for the device, or have a shape that depends on data.
WAITING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "item", "equal")


class Recorder(TorchDispatchMode):
    """Operators as a CUDA graph holds them: run once, then repeated on the same memory with the same Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in WAITING), f"{func} waits for the device"
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            for kept, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


class ReplayedGraphs(Graphs):
    """CUDA graphs on a CPU: what a stage did when it was captured is all that it will ever do.

    With `late` a stage is captured when it first runs: most of a policy's widths never do.
    """

    def __init__(self, device: torch.device, late: bool = False) -> None:
        super().__init__(device)
        self.recorded: dict[object, Recorder] = {}
        self._late, self._changing = late, ()

    def prepare(self, key, stage, changing) -> None:
        self._changing = changing
        if not self._late:
            self._record(key, stage)

    def run(self, key, stage) -> None:
        self._record(key, stage)
        self.recorded[key].replay()

    def _record(self, key, stage) -> None:
        if key in self.recorded:
            return
        before = [tensor.clone() for tensor in self._changing]
        with Recorder() as self.recorded[key]:
            stage()
        for tensor, old in zip(self._changing, before, strict=True):
            tensor.copy_(old)

    def clear(self) -> None:
        self.recorded.clear()


def without_the_block(made: Pooled) -> Pooled:
    """As where it is known to add nothing: a drafter is asked once in a while."""
    for kind in made.gains.kinds:
        kind.block = Gain(0.0, 10**6)
    return made


def tiny_dflash(
    target: Target,
    draft_tokens: list[int] | None = None,
    seed: int = 1,
    taps: tuple[int, ...] = (0, 2),
    rank: int = 0,
    causal: bool = False,
    block_size: int = 8,
    form: str = "",
) -> DFlashDrafter:
    """A random DFlash drafter for a tiny target, sharper than noise so that it proposes something."""
    with tempfile.TemporaryDirectory() as folder:
        dflash_files(target, Path(folder), seed, taps, rank, causal, block_size, form)
        if draft_tokens is not None:
            (Path(folder) / "draft_tokens.json").write_text(json.dumps(draft_tokens))
        return DFlashDrafter.load(folder, target)


def dflash_files(
    target: Target,
    folder: Path,
    seed: int = 1,
    taps: tuple[int, ...] = (0, 2),
    rank: int = 0,
    causal: bool = False,
    block_size: int = 8,
    form: str = "",
) -> None:
    """Such a drafter in its makers' format; of `rank` are scores of pairs, 0: none. `form`: one of ARCHITECTURES."""
    hidden, heads, kv, dim, inter, layers = target.hidden_size, 4, 2, 8, 48, 2
    torch.manual_seed(seed)
    shapes = {"fc": (hidden, len(taps) * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.{name}": shape
            for name, shape in {
                "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (heads * dim, hidden), "self_attn.k_proj": (kv * dim, hidden),
                "self_attn.v_proj": (kv * dim, hidden), "self_attn.o_proj": (hidden, heads * dim),
                "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,), "mlp.gate_proj": (inter, hidden),
                "mlp.up_proj": (inter, hidden), "mlp.down_proj": (hidden, inter),
            }.items()
        }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(shape) * 0.3 + (len(shape) == 1) for name, shape in shapes.items()}
    for i, part in itertools.product(range(layers), ("attention_conv", "mlp_conv") if form == "DFlash 2" else ()):
        weights[f"layers.{i}.{part}.base_kernel"] = torch.tensor([1.0, 0.0])[:, None] + torch.randn(2, 2, hidden) * 0.2
        weights[f"layers.{i}.{part}.kernel_projection.weight"] = torch.randn(2 * 2 * 4, hidden) * 0.1
    if form == "DSpark":
        weights |= {f"markov_head.markov_w{i}.weight": torch.randn(target.vocab_size, 4) for i in (1, 2)}
    if form == "DFlash 2":
        weights |= {f"candidate_selector.{n}_codebook": torch.randn(target.vocab_size, 4) for n in CODEBOOKS}
        weights["candidate_selector.hidden_projection.weight"] = torch.randn(4, hidden) * 0.3
    config = dict(
        architectures=[ARCHITECTURES[form]], model_type="qwen3",
        block_size=block_size, num_target_layers=target.num_layers,
        dflash_config=dict(mask_token_id=96, target_layer_ids=list(taps), markov_rank=rank)
        | (dict(markov_rank=4) if form == "DSpark" else {}) | (
            dict(conv_kernel_size=2, conv_group_size=hidden // 4, selector_rank=4, selector_top_k=6)
            if form == "DFlash 2" else {}
        ),
        hidden_size=hidden, intermediate_size=inter,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv, head_dim=dim,
        rms_norm_eps=1e-6, rope_theta=1e4, vocab_size=target.vocab_size, max_position_embeddings=256,
        layer_types=["full_attention"] * layers, is_causal=causal,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    if rank:
        (folder / "markov").mkdir(exist_ok=True)
        pairs = {f"{name}.weight": torch.randn(rank, hidden) * 0.4 for name in ("before", "after")}
        save_file(pairs, folder / "markov" / "model.safetensors")


def eagle3_files(
    target: Target, folder: Path, form: str = "safeailab", draft_vocab: int | None = 40, **changed
) -> None:
    """A random EAGLE-3 checkpoint for a tiny target, in one of the published forms."""
    torch.manual_seed(3)
    hidden, heads, kv, dim, inter = changed.get("hidden_size", target.hidden_size), 4, 2, 8, 48
    prefix = "layers.0." if form == "speculators" else "midlayer."
    vocab = draft_vocab or target.vocab_size
    shapes = {
        "fc": (hidden, 3 * target.hidden_size), "norm": (hidden,), "lm_head": (vocab, hidden),
        **{f"{prefix}{name}": shape for name, shape in {
            "input_layernorm": (hidden,), "hidden_norm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * dim, 2 * hidden), "self_attn.k_proj": (kv * dim, 2 * hidden),
            "self_attn.v_proj": (kv * dim, 2 * hidden), "self_attn.o_proj": (hidden, heads * dim),
            "mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden), "mlp.down_proj": (hidden, inter),
        }.items()},
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(shape) * 0.4 + (len(shape) == 1) for name, shape in shapes.items()}
    config = dict(
        architectures=["LlamaForCausalLMEagle3"], hidden_size=hidden, intermediate_size=inter, num_hidden_layers=1,
        num_attention_heads=heads, num_key_value_heads=kv, head_dim=dim, rms_norm_eps=1e-6,
        vocab_size=target.vocab_size, max_position_embeddings=256,
        eagle_config=dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
    )  # fmt: skip
    if draft_vocab:
        ids = torch.arange(draft_vocab) * 2 + 1
        tensors |= {"d2t": ids - torch.arange(draft_vocab), "t2d": torch.isin(torch.arange(target.vocab_size), ids)}
        config["draft_vocab_size"] = draft_vocab
    tensors |= {name: value for name, value in changed.items() if isinstance(value, torch.Tensor)}
    config |= {name: value for name, value in changed.items() if not isinstance(value, torch.Tensor)}
    if form == "speculators":
        layer = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings")  # fmt: skip
        config["transformer_layer_config"] = {key: config.pop(key) for key in layer}
        del config["eagle_config"]
        config |= dict(eagle_aux_hidden_state_layer_ids=[1, 2, 3], target_hidden_size=config.get("target_hidden_size"))
    (folder / "config.json").write_text(json.dumps(config))
    if form == "safeailab":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


def tiny_eagle3(target: Target, options: str = "depth=3,beam=3", **form):
    with tempfile.TemporaryDirectory() as folder:
        eagle3_files(target, Path(folder), **form)
        return Eagle3Drafter.load(f"{folder},{options}", target)

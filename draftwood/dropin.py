"""A drop-in for people who stay with transformers: `model.generate(**inputs, custom_generate=...)`.

    generate = draftwood.custom_generate(drafter="z-lab/Qwen3-8B-DFlash-b16")
    model.generate(**inputs, max_new_tokens=256, custom_generate=generate)

transformers prepares its logits processors and stopping criteria as always. Temperature, top-k, top-p and min-p become
draftwood's own parameters; all other processors are applied at every node of the tree, to the path that leads to it. So
the output is what `generate` would give: the same tokens when greedy, the same distribution when sampling. transformers
passes no streamer on to a custom decoding method; to stream, use `draftwood.load`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwood import registry
from draftwood.assemble import build_engine
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.sampling import Rule, Sampling
from draftwood.target import Target

WARPERS = {  # the parameter that each of them has, in the order in which they apply
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
HARMLESS = ("attention_mask", "position_ids", "cache_position", "token_type_ids", "logits_to_keep")
COPIES = ("num_beams", "num_return_sequences")  # settings that make a batch of one text
MODES = ("penalty_alpha", "dola_layers")  # of settings, those that choose another kind of decoding
NOT_GIVEN = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class CustomGenerate:
    """A decoding method for `generate`. Between calls it keeps the target, the drafter and what was learned."""

    def __init__(self, drafter: registry.Named = registry.UNTRAINED, policy: str = "bastion") -> None:
        self._drafter_name = drafter
        self._policy = registry.policy(policy)
        self._engine: Engine | None = None
        self._lock = threading.Lock()  # the model is changed while it writes, so one thread after the other

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,  # [1, T]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **more: Any,
    ) -> Any:
        """Called by `generate`. Returns `[1, T + new]`, or `generate`'s output record if the config asks for it."""
        for name in COPIES:
            if (getattr(generation_config, name, None) or 1) > 1:
                raise BadInput(f"draftwood writes one text, without a beam search; leave out {name}.")
        if input_ids.shape[0] != 1:
            raise BadInput(f"draftwood generates one sequence at a time, not a batch of {input_ids.shape[0]}.")
        check_inputs(generation_config, more)
        with self._lock:
            modes = [(module, module.training) for module in model.modules()]
            try:
                return self._generate(model, input_ids, logits_processor, stopping_criteria, generation_config)
            finally:
                for module, training in modes:
                    module.training = training

    def _generate(self, model: PreTrainedModel, input_ids: Tensor, processor: Any, criteria: Any, config: Any) -> Any:
        model.eval()
        engine = self._engine_of(model)
        sampling, rule = drawing(processor, config.do_sample, input_ids.device)
        engine.target.attach()
        try:
            heat = (config.temperature or 1.0) if rule else None
            ids = self._run(engine, input_ids, criteria, sampling, rule, heat)
        finally:
            engine.target.release()
        if not config.return_dict_in_generate:
            return ids
        return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, ids))

    def _run(
        self, engine: Engine, ids: Tensor, criteria: Any, sampling: Sampling, rule: Rule | None, heat: float | None
    ) -> Tensor:
        prompt = ids[0].tolist()
        room = engine.target.context_limit - len(prompt)
        limit = getattr(criteria, "max_length", None)
        ends = frozenset(
            token for one in criteria if isinstance(one, EosTokenCriteria) for token in one.eos_token_id.tolist()
        )
        new_tokens = min(room, limit - len(prompt)) if limit else room
        for step in engine.run(prompt, new_tokens, sampling, ends, rule, heat=heat):
            for token in step.tokens:
                fresh = torch.tensor([[token]], device=ids.device)
                ids = torch.cat([ids, fresh], dim=1)
                if bool(torch.as_tensor(criteria(ids, None)).all()):
                    return ids
        return ids

    def _engine_of(self, model: PreTrainedModel) -> Engine:
        if self._engine is None or self._engine.target.model is not model:
            target = Target(model, getattr(model.config, "_name_or_path", "") or type(model).__name__)
            try:
                self._engine = build_engine(target, self._drafter_name, self._policy)
            except BaseException:
                target.release()
                raise
        return self._engine


def custom_generate(drafter: registry.Named = registry.UNTRAINED, policy: str = "bastion") -> CustomGenerate:
    """A decoding method for `model.generate(custom_generate=...)`; one sequence at a time."""
    return CustomGenerate(drafter, policy)


def check_inputs(config: Any, more: Mapping[str, Any]) -> None:
    """Refuse inputs that would change the text but are not used here, and outputs that are not given."""
    mask, cache = more.get("attention_mask"), more.get("past_key_values")
    if mask is not None and not bool(mask.all()):
        raise BadInput("draftwood does not read prompts with padding; leave out the tokens that attention_mask hides.")
    if cache is not None and cache.get_seq_length():
        raise BadInput("draftwood keeps its own cache; leave out past_key_values and give the whole text.")
    unused = [name for name, value in more.items() if isinstance(value, Tensor) and name not in HARMLESS]
    if unused:
        raise BadInput(f"draftwood reads only input_ids, not {', '.join(unused)}; for these, use generate without it.")
    modes = [name for name in MODES if getattr(config, name, None)]
    if modes:
        raise BadInput(f"draftwood samples or takes the likeliest token; leave out {', '.join(modes)}.")
    wanted = [name for name in NOT_GIVEN if getattr(config, name, None)]
    if wanted:
        raise BadInput(f"draftwood returns only the text; leave out {', '.join(wanted)}.")


def drawing(processor: Any, samples: bool, device: torch.device) -> tuple[Sampling, Rule | None]:
    """How to draw as `generate` would: with draftwood's own parameters if they cover all of its processors, else with a
    rule that applies the processors."""
    seed = int(torch.randint(2**62, (1,))) if samples else 0
    own = _own_parameters(processor)
    if own is not None and (samples or not own):
        return replace(Sampling(float(samples), seed=seed), **own), None  # type: ignore[arg-type]
    return Sampling(float(samples), seed=seed), _rule(processor, device)


def _own_parameters(processor: Any) -> dict[str, float] | None:
    """The parameters of `Sampling` that the processors stand for; None if they do more, or in another order."""
    found: dict[str, float] = {}
    left = iter(WARPERS.items())
    for one in processor:
        name = next((name for kind, name in left if type(one) is kind), None)
        kept, filled = getattr(one, "min_tokens_to_keep", 1), getattr(one, "filter_value", -torch.inf)
        value = name and getattr(one, name)
        if not (name and value) or kept != 1 or filled != -torch.inf:  # transformers takes a top-p of 0 for greedy
            return None
        found[name] = value
    return found


def _rule(processor: Any, device: torch.device) -> Rule:
    def apply(tokens: list[int], scores: Tensor) -> Tensor:
        scores_there = scores[None].to(device, copy=True)  # where the prompt is; copied, since some write into it
        return processor(torch.tensor([tokens], device=device), scores_there)[0].to(scores.device)

    return apply

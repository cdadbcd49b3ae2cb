"""A drop-in for people who stay with transformers: `model.generate(**inputs, custom_generate=...)`.

    generate = draftwood.custom_generate(drafter="z-lab/Qwen3-8B-DFlash-b16")
    model.generate(**inputs, max_new_tokens=256, custom_generate=generate)

transformers prepares its logits processors and stopping criteria as always; they are applied at every node of
the tree along its path, so the output is what `generate` would give: the same tokens when greedy, the same
distribution when sampling. transformers passes no streamer on to a custom decoding method; to stream, use
`draftwood.load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from draftwood import registry
from draftwood.assemble import build_engine
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.sampling import Rule, Sampling
from draftwood.target import Target

HARMLESS = ("attention_mask", "position_ids", "cache_position", "token_type_ids", "logits_to_keep")
NOT_GIVEN = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class CustomGenerate:
    """A decoding method for `generate`. Keeps the target, drafter and what was learned between calls."""

    def __init__(self, drafter: registry.Named = registry.UNTRAINED, policy: str = "bastion") -> None:
        self._drafter_name = drafter
        self._policy = registry.policy(policy)
        self._engine: Engine | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,  # [1, T]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **more: Any,
    ) -> Any:
        """Called by `generate`. Returns `[1, T + new]`, or its output record if asked to."""
        if input_ids.shape[0] != 1:
            raise BadInput(f"draftwood generates one sequence at a time, not a batch of {input_ids.shape[0]}.")
        check_inputs(generation_config, more)
        modes = [(module, module.training) for module in model.modules()]
        try:
            return self._generate(model, input_ids, logits_processor, stopping_criteria, generation_config)
        finally:
            for module, training in modes:
                module.training = training

    def _generate(self, model: PreTrainedModel, input_ids: Tensor, processor: Any, criteria: Any, config: Any) -> Any:
        model.eval()
        engine = self._engine_of(model)
        sampling, heat = Sampling(), config.temperature or 1.0
        if config.do_sample:  # the processors already hold temperature, top-k and the rest
            sampling = Sampling(temperature=1.0, seed=int(torch.randint(2**62, (1,))))
        engine.target.attach()
        try:
            ids = self._run(engine, input_ids, processor, criteria, sampling, heat)
        finally:
            engine.target.release()
        if not config.return_dict_in_generate:
            return ids
        return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, ids))

    def _run(
        self, engine: Engine, ids: Tensor, processor: Any, criteria: Any, sampling: Sampling, heat: float
    ) -> Tensor:
        prompt = ids[0].tolist()
        room = engine.target.context_limit - len(prompt)
        limit = getattr(criteria, "max_length", None)
        new_tokens = min(room, limit - len(prompt)) if limit else room
        for step in engine.run(prompt, new_tokens, sampling, rule=_rule(processor, ids.device), heat=heat):
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
    """Refuse what would change the text and is not used here, or is asked for and not given."""
    mask, cache = more.get("attention_mask"), more.get("past_key_values")
    if mask is not None and not bool(mask.all()):
        raise BadInput("draftwood does not read prompts with padding; leave out the tokens that attention_mask hides.")
    if cache is not None and cache.get_seq_length():
        raise BadInput("draftwood keeps its own cache; leave out past_key_values and give the whole text.")
    unused = [name for name, value in more.items() if isinstance(value, Tensor) and name not in HARMLESS]
    if unused:
        raise BadInput(f"draftwood reads input_ids alone, not {', '.join(unused)}; use generate without it for these.")
    wanted = [name for name in NOT_GIVEN if getattr(config, name, None)]
    if wanted:
        raise BadInput(f"draftwood gives the text alone; leave out {', '.join(wanted)}.")


def _rule(processor: Any, device: torch.device) -> Rule:
    def apply(tokens: list[int], scores: Tensor) -> Tensor:
        scores_there = scores[None].to(device, copy=True)  # where the prompt is; and some write into it
        return processor(torch.tensor([tokens], device=device), scores_there)[0].to(scores.device)

    return apply

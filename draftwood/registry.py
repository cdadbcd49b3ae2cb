"""Policies and drafters by name: built in, or from any installed package's entry points.

A package adds its own through the groups `draftwood.policies` (a class with `parse(argument: str | None)`)
and `draftwood.drafters` (a class with `load(argument: str, target)`). Nothing is imported before it is asked
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import BadInput, first_line, nearest
from draftwood.policies.base import Policy

if TYPE_CHECKING:
    from draftwood.drafters.base import Drafter
    from draftwood.target import Target

Named = str | PathLike[str] | Sequence[str | PathLike[str]]  # one drafter or several

POLICIES = "draftwood.policies"
DRAFTERS = "draftwood.drafters"
UNTRAINED = ("ngram", "recycling")  # they draft for every target, by themselves or beside others
BUILT_IN = (
    EntryPoint("autoregressive", "draftwood.policies.autoregressive:Autoregressive", POLICIES),
    EntryPoint("dflash", "draftwood.policies.dflash:DFlash", POLICIES),
    EntryPoint("ddtree", "draftwood.policies.ddtree:DDTree", POLICIES),
    EntryPoint("beam", "draftwood.policies.beam:Beam", POLICIES),
    EntryPoint("caddtree", "draftwood.policies.caddtree:CaDDTree", POLICIES),
    EntryPoint("bastion", "draftwood.policies.bastion:Bastion", POLICIES),
    EntryPoint("record", "draftwood.policies.record:Record", POLICIES),
    EntryPoint("ngram", "draftwood.drafters.ngram:NgramDrafter", DRAFTERS),
    EntryPoint("recycling", "draftwood.drafters.pooled:Recycling", DRAFTERS),
    EntryPoint("dflash", "draftwood.drafters.dflash:DFlashDrafter", DRAFTERS),
    EntryPoint("shipped", "draftwood.drafters.shipped:ShippedDrafter", DRAFTERS),
    EntryPoint("d2sd", "draftwood.drafters.d2sd:D2SDDrafter", DRAFTERS),
    EntryPoint("eagle3", "draftwood.drafters.eagle3:Eagle3Drafter", DRAFTERS),
    EntryPoint("draft-model", "draftwood.drafters.draft_model:DraftModel", DRAFTERS),
)


def policy_names() -> list[str]:
    """Every policy that `policy` knows, without parameters."""
    return sorted(_entries(POLICIES))


def drafter_names() -> list[str]:
    """Every kind of drafter that can be named; a folder or a Hub name means `dflash`."""
    return sorted({"none", *_entries(DRAFTERS)})


def policy(spec: str) -> Policy:
    """`"ddtree:32"` -> the rule. Raises BadInput for an unknown name or a parameter it cannot use."""
    name, colon, argument = spec.partition(":")
    entry = _entry(POLICIES, name)
    if entry is None:
        raise BadInput(_unknown("policy", spec, name, policy_names()))
    try:
        rule: Policy = _load(entry).parse(argument if colon else None)
    except BadInput:
        raise
    except (ValueError, TypeError) as mistake:  # of another package's policy
        raise BadInput(f"The policy {name} cannot use {argument!r}: {first_line(mistake)}") from mistake
    return rule


def drafter(spec: Named, target: Target) -> Drafter | None:
    """A drafter for `target`: `none`, `ngram`, `kind:argument`, or a folder or Hub name in DFlash's format.

    Several of them, as a sequence or joined by +, propose together. Raises BadInput for a name that is none of these,
    BadModel if it does not fit the target.
    """
    specs = drafter_specs(spec)
    if specs == ["none"]:
        return None
    from draftwood.drafters.pooled import Pooled  # imports torch

    kinds = [_drafter_kind(each) for each in specs]
    parts = [kind.load(argument, target) for kind, argument in kinds]
    made: Drafter = Pooled(parts) if len(parts) > 1 or Pooled.comments(parts[0]) else parts[0]
    return made


def drafter_specs(spec: Named) -> list[str]:
    """`"ngram+recycling"` or `["ngram", "recycling"]` -> each by itself. A folder's name may hold a + of its own."""
    try:
        given = [fspath(each) for each in ([spec] if isinstance(spec, str | PathLike) else spec)]
    except TypeError:
        raise BadInput(
            f"The drafter is {spec!r}; expected a name or a list of names; a class of your own gets its name as an "
            f"entry point of the group {DRAFTERS}."
        ) from None
    specs = [part for each in given for part in ([each] if Path(each).is_dir() else each.split("+"))]
    if len(set(specs)) < len(specs) or not specs or ("none" in specs and len(specs) > 1):
        raise BadInput(f"The drafters are {', '.join(specs) or 'not named'}; name each once, or 'none' by itself.")
    return specs


def drafter_bytes(spec: Named, itemsize: int) -> int:
    """Bytes of the weights of drafters that are not loaded yet, as far as they can be counted. Raises as `drafter`."""
    from draftwood.drafters.base import Weighed  # imports torch

    kinds = [_drafter_kind(each) for each in drafter_specs(spec) if each != "none"]
    return sum(int(kind.weight_bytes(argument, itemsize)) for kind, argument in kinds if issubclass(kind, Weighed))


def check_drafters(spec: Named) -> None:
    """Raises BadInput for a name that is unknown, or is there twice. Imports no drafters, since they need torch."""
    for each in drafter_specs(spec):
        if each != "none":
            _drafter_entry(each)


def _drafter_kind(spec: str) -> tuple[Any, str]:
    """The class of a drafter and the argument of its `load`."""
    entry, argument = _drafter_entry(spec)
    return _load(entry), argument


def _drafter_entry(spec: str) -> tuple[EntryPoint, str]:
    """Where the class of a drafter is, and the argument of its `load`."""
    kind, _, argument = spec.partition(":")
    entry = _entry(DRAFTERS, kind)
    if entry is None:
        if "/" not in spec and not Path(spec).is_dir():
            problem = _unknown("drafter", spec, kind, drafter_names())
            raise BadInput(f"{problem} A folder or a Hub name (owner/name) works too.")
        entry, argument = _built_in(DRAFTERS)["dflash"], spec
    return entry, argument


def _entry(group: str, name: str) -> EntryPoint | None:
    """A built-in name stays ours whatever is installed, and is found without searching installed packages."""
    return _built_in(group).get(name) or _entries(group).get(name)


def _entries(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group)} | _built_in(group)


def _built_in(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in BUILT_IN if entry.group == group}


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise BadInput(f"{entry.name} ({entry.value}) cannot be imported: {error}.") from error


def _unknown(noun: str, spec: str, name: str, valid: list[str]) -> str:
    return f"Unknown {noun} '{spec}'.{nearest(name, valid)} Valid: {', '.join(valid)}."

"""``[algorithm]``: a preset and its keywords, there and back."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

import msgspec
import tomli_w

from sparseloco.algorithm import Algorithm, Recipe
from sparseloco.config.sections import did_you_mean, to_struct
from sparseloco.errors import ConfigError
from sparseloco.local import Gradients, InnerSteps, OptimizerSpec, adamw, sgd
from sparseloco.muon_adamw import muon
from sparseloco.outer import Sgd, TorchOptimizer
from sparseloco.presets import PRESETS
from sparseloco.schedule import WarmupCosine
from sparseloco.settings import OptimizerConfig, RunConfig, either
from sparseloco.update import ClipNorm

PRIVATE = frozenset({"inner", "clip_norm"})
"""Keywords of presets that come from ``[optimizer]`` instead of ``[algorithm]``."""

_ALIASES = {
    "every": "inner_steps",
    "lr": "outer_lr",
    "momentum": "outer_momentum",
    "over": "mean_over",
    "rows": "tile",
    "side": "tile",
}
"""Names that parts use in their errors -> keywords of presets that they come from."""


def parse_recipe(section: Mapping[str, Any] | None) -> Recipe:
    """Check an ``[algorithm]`` section against the signature of its preset.

    Returns:
        The preset and all its keywords, defaults included.

    Raises:
        ConfigError: if there is no such preset or keyword, or the preset refuses a value.
    """
    known = f"name one of {', '.join(PRESETS)}"
    if section is None:
        raise ConfigError('algorithm: missing section; add [algorithm] with, for example, preset = "sparseloco"')
    if "preset" not in section:
        raise ConfigError(f"algorithm.preset: missing key; {known}")
    preset = section["preset"]
    if not isinstance(preset, str):
        raise ConfigError(f"algorithm.preset={preset!r}: must be text in quotes; {known}")
    keywords = {name: value for name, value in section.items() if name != "preset"}
    recipe = Recipe(preset, _complete(preset, keywords))
    # A learning rate will be a function of the step, and parts check only numbers.
    if (rate := recipe.settings.get("lr", 1.0)) <= 0:
        raise ConfigError(f"algorithm.lr={rate!r}: must be positive; use 0.001")
    _call(recipe, recipe.settings)
    return recipe


def build_algorithm(config: RunConfig, total_steps: int | None = None) -> Algorithm:
    """The algorithm that a configuration describes, with its inner optimizer and learning rates over time.

    Args:
        config: Resolved settings.
        total_steps: Step at which the cosine ends; default ``config.train.steps``.

    Raises:
        ConfigError: if the preset refuses a keyword, or the steps end in the middle of a round.
    """
    recipe, optimizer = config.algorithm, config.optimizer
    taken = inspect.signature(_preset(recipe.preset)).parameters
    keywords = dict(recipe.settings)

    def over_time(peak: float) -> WarmupCosine:
        return WarmupCosine(
            peak=peak,
            total_steps=config.train.steps if total_steps is None else total_steps,
            warmup_steps=optimizer.warmup_steps,
            final_fraction=optimizer.final_lr_fraction,
        )

    if "inner" in taken:
        keywords["inner"] = _inner_optimizer(optimizer, over_time(optimizer.lr))
    if "clip_norm" in taken:
        keywords["clip_norm"] = optimizer.clip_norm or None
    if "lr" in keywords:
        keywords["lr"] = over_time(keywords["lr"])
    algorithm = _call(recipe, keywords)
    _check_rounds(config.train.steps, algorithm.schedule.every)
    return algorithm


def algorithm_to_toml(algorithm: Algorithm) -> str:
    """The ``[algorithm]`` section of an algorithm that ``build_algorithm`` or ``presets.build`` has made.

    Raises:
        ConfigError: if it was composed by hand, or changed since: no preset and keywords would give it back.
    """
    recipe = algorithm.recipe
    if recipe is None:
        raise ConfigError(
            "algorithm.recipe=None: must name a preset to be written as TOML, and an algorithm composed by hand has "
            "none; make it with presets.build(), or keep it in Python"
        )
    again = _call(recipe, {**recipe.settings, **_private_keywords(algorithm, recipe)})
    changed = [f.name for f in fields(Algorithm) if f.compare and getattr(again, f.name) != getattr(algorithm, f.name)]
    if changed:
        raise ConfigError(
            f"algorithm.recipe={recipe.preset!r}: must give the algorithm back to be written as TOML, but its "
            f"{' and '.join(changed)} would not be the same; change the preset's keywords instead of the parts, or "
            "keep it in Python"
        )
    return tomli_w.dumps({"algorithm": {"preset": recipe.preset, **_complete(recipe.preset, recipe.settings)}})


def keywords_of(preset: str) -> dict[str, tuple[type, Any]]:
    """Keywords of a preset that stand in ``[algorithm]``: name -> type and default.

    Example:
        >>> keywords_of("ef_signsgd")
        {'lr': (<class 'float'>, 0.001)}
    """
    function = _preset(preset)
    hints = typing.get_type_hints(function)
    return {
        name: (_plain_type(hints[name]), parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in PRIVATE
    }


@cache
def _schema(preset: str) -> type[msgspec.Struct]:
    rows = [(name, kind, default) for name, (kind, default) in keywords_of(preset).items()]
    return msgspec.defstruct(preset, rows, frozen=True, kw_only=True, forbid_unknown_fields=True)


def _complete(preset: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    return msgspec.structs.asdict(to_struct(_schema(preset), "algorithm", keywords))


def _plain_type(hint: Any) -> Any:
    """What a file can hold of a hint: ``float | Schedule`` is a float."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    return next(kind for kind in typing.get_args(hint) if kind in (bool, int, float, str))


def _preset(name: str) -> Callable[..., Algorithm]:
    if name not in PRESETS:
        raise ConfigError(f"algorithm: unknown preset {name!r}; {did_you_mean(name, PRESETS, 'presets')}")
    return PRESETS[name]


def _call(recipe: Recipe, keywords: Mapping[str, Any]) -> Algorithm:
    """Call the preset; an error of one of its parts then names the keyword that stands in the file."""
    try:
        return replace(_preset(recipe.preset)(**keywords), recipe=recipe)
    except ConfigError as error:
        name, equals, rest = str(error).partition("=")
        if not equals or not name.isidentifier():
            raise
        candidates = (name, _ALIASES.get(name, name))
        if name == "name":  # of the inner optimizer
            raise ConfigError(f"optimizer.{error}") from error
        keyword = next((known for known in candidates if known in recipe.settings), name)
        raise ConfigError(f"algorithm.{keyword}={rest}") from error


def _inner_optimizer(optimizer: OptimizerConfig, lr: WarmupCosine) -> OptimizerSpec:
    if optimizer.name == "sgd":
        return sgd(lr, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay)
    if optimizer.name == "muon":
        return _muon(optimizer, lr)
    return adamw(lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay)


def _muon(optimizer: OptimizerConfig, lr: WarmupCosine) -> OptimizerSpec:
    try:
        return muon(lr, momentum=optimizer.momentum, betas=optimizer.betas, weight_decay=optimizer.weight_decay)
    except ConfigError as error:
        raise ConfigError(f"optimizer.{error}") from error


def _private_keywords(algorithm: Algorithm, recipe: Recipe) -> dict[str, Any]:
    """What ``[optimizer]`` adds to the keywords of a preset, read off an algorithm."""
    local, outer, found = algorithm.local, algorithm.outer, {}
    if isinstance(local, InnerSteps):
        found = {"inner": local.optimizer, "clip_norm": local.clip_norm}
    elif isinstance(outer, TorchOptimizer):
        clips = [part.max_norm for part in algorithm.channel.transforms if isinstance(part, ClipNorm)]
        found = {"inner": outer.spec, "clip_norm": clips[0] if clips else None}
    rates = [outer.lr if isinstance(outer, Sgd) else None, local.scale if isinstance(local, Gradients) else None]
    for rate in rates:
        if isinstance(rate, WarmupCosine) and rate.peak == recipe.settings.get("lr"):
            found["lr"] = rate
    taken = inspect.signature(_preset(recipe.preset)).parameters
    return {name: value for name, value in found.items() if name in taken}


def _check_rounds(steps: int, inner_steps: int) -> None:
    """Refuse a number of steps that ends in the middle of a round.

    Raises:
        ConfigError: if ``steps`` is no multiple of ``inner_steps``; it names the nearest ones.
    """
    if steps % inner_steps:
        below = steps - steps % inner_steps
        raise ConfigError(
            f"train.steps={steps}: must be a multiple of inner_steps={inner_steps}, or the last steps would never be "
            f"synchronized; use {either([below, below + inner_steps] if below else [inner_steps])}"
        )

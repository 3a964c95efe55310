"""The settings of a run: frozen values, one per section of the file, that check themselves.

Knows nothing of files, overrides or presets' keywords; see ``config`` for those.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import tomli_w
import torch

from sparseloco.algorithm import Recipe
from sparseloco.data.settings import DataConfig, SourceConfig
from sparseloco.errors import ConfigError
from sparseloco.presets import PRESETS

__all__ = [
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "TrainConfig",
    "TransportConfig",
    "check_rounds",
    "optimizer_defaults",
    "optimizer_keys",
    "to_table",
    "to_toml",
]


def _at_least(section: str, name: str, value: float, least: int, *, why: str = "", use: str = "") -> None:
    if value < least:
        raise ConfigError(f"{section}.{name}={value!r}: must be at least {least}{why}; use {use or f'{least} or more'}")


def _one_of(section: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{section}.{name}={value!r}: must be one of {', '.join(choices)}; choose one of them")


def _either(values: list[int]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def has_fast_bf16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware; without that, autocast on a CPU only costs time."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One section of a configuration file."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """``[model]``: what is trained.

    Either a Llama from its numbers, whose vocabulary is the tokenizer's and whose context is ``sequence_length``; or
    ``config``, ``pretrained`` or ``shape`` alone, for any causal language model that ``transformers`` knows.

    Attributes:
        config: A ``config.json``, a folder that holds one, or a name on the Hub: that model with new weights.
        pretrained: A folder of ``save_pretrained``, or a name on the Hub: that model with its weights.
        shape: ``[model.shape]``: what a ``config.json`` would hold, ``model_type`` first, for new weights; keys that
            are left out have the defaults of ``transformers``.
        hidden_size: Width; a multiple of ``2 * num_heads``.
        num_layers: Blocks.
        num_heads: Attention heads.
        intermediate_size: Width inside the gated feed-forward part.
        tie_embeddings: Use one matrix for tokens in and out.
    """

    config: str = ""
    pretrained: str = ""
    shape: dict[str, Any] = {}
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    intermediate_size: int = 352
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size"):
            _at_least("model", name, getattr(self, name), 1)
        if self.config and self.pretrained:
            raise ConfigError(
                f"model.config={self.config!r}: must not stand beside model.pretrained={self.pretrained!r}; keep "
                "config for new weights, or pretrained to go on from its own"
            )
        if self.shape:
            self._check_shape()
        if self.is_named:
            self._refuse_numbers()

    @property
    def is_named(self) -> bool:
        """Whether the model is one of ``transformers`` by name, path or shape, not a Llama from numbers."""
        return bool(self.config or self.pretrained or self.shape)

    def _check_shape(self) -> None:
        kind = self.shape.get("model_type")
        if not isinstance(kind, str) or not kind:
            raise ConfigError(
                f"model.shape.model_type={kind!r}: must name a model of transformers in quotes; write, for example, "
                'model_type = "llama"'
            )
        for name in ("config", "pretrained"):
            if value := getattr(self, name):
                raise ConfigError(
                    f"model.{name}={value!r}: must not stand beside [model.shape], which says what is built; keep one "
                    "of them"
                )

    def _refuse_numbers(self) -> None:
        named = next(name for name in ("config", "pretrained", "shape") if getattr(self, name))
        words = "[model.shape]" if self.shape else f"model.{named}={getattr(self, named)!r}"
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("config", "pretrained", "shape") and value != field.default:
                raise ConfigError(
                    f"model.{field.name}={value!r}: must be left out beside {words}, which says it already; change it "
                    "there"
                )


class TrainConfig(Section, frozen=True, kw_only=True):
    """``[train]``: how much, and on what share of the machine.

    Attributes:
        workers: Replicas.
        steps: Optimizer steps of each replica; a file may say ``rounds`` instead.
        batch_size: Sequences per replica and optimizer step.
        accumulation: Micro-batches per optimizer step; divides ``batch_size``.
        sequence_length: Tokens that are predicted per sequence.
        seed: Of initial weights, sample order and everything else that is random.
        evaluate_every: Optimizer steps between two evaluations on the validation split.
        log_every: Optimizer steps between two lines of the training loss.
        evaluation_tokens: Tokens of an evaluation, at most.
        autocast: "bf16" for mixed precision, "off" for float32; "auto" becomes "bf16" where the processor has
            instructions for it, else "off".
        processes: Run each replica as a process of its own instead of all in one.
        nonfinite: What a replica does whose loss or parameters are not finite: "abstain" from the round, which goes on
            among the others, and start the next one from the shared parameters; "stop" ends the run of all.
    """

    workers: int = 4
    steps: int = 450
    batch_size: int = 8
    accumulation: int = 1
    sequence_length: int = 128
    seed: int = 0
    evaluate_every: int = 75
    log_every: int = 15
    evaluation_tokens: int = 65536
    autocast: Literal["auto", "off", "bf16"] = "auto"
    processes: bool = False
    nonfinite: Literal["abstain", "stop"] = "abstain"

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "batch_size", "accumulation", "evaluate_every", "log_every"):
            _at_least("train", name, getattr(self, name), 1)
        _at_least("train", "sequence_length", self.sequence_length, 2, use="128")
        _at_least("train", "evaluation_tokens", self.evaluation_tokens, self.sequence_length, why=" (one sequence)")
        if self.batch_size % self.accumulation:
            divisors = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise ConfigError(
                f"train.accumulation={self.accumulation}: must divide batch_size={self.batch_size}; "
                f"use {_either(divisors)}"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"train.seed={self.seed}: must be in 0..2**63 - 1; use 0")
        _one_of("train", "nonfinite", self.nonfinite, ("abstain", "stop"))
        _one_of("train", "autocast", self.autocast, ("auto", "off", "bf16"))
        if self.autocast == "auto":
            # Resolved here, so that the file in a run folder says what the run did.
            msgspec.structs.force_setattr(self, "autocast", "bf16" if has_fast_bf16() else "off")

    @property
    def tokens(self) -> int:
        """Tokens that all replicas see in a whole run."""
        return self.steps * self.workers * self.batch_size * self.sequence_length


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """``[optimizer]``: the inner optimizer, and the shape of every learning rate over time.

    Methods that send gradients with a learning rate of their own (``demo``, ``ef_signsgd``, ``powersgd``) take only
    ``warmup_steps`` and ``final_lr_fraction`` from here, and other keys are refused; their ``lr`` stands in
    ``[algorithm]``.

    Attributes:
        name: "adamw", "sgd", or "muon": Muon for matrices and AdamW for the rest. A file that leaves it out means
            "sgd" for ``local_sgd`` and ``qsparse_local_sgd``.
        lr: Largest learning rate; a file that leaves it out means 0.3 for sgd. Muon takes AdamW's: its steps are
            scaled to the size of AdamW's.
        betas: Decay rates of AdamW's moments, also of the AdamW beside Muon.
        momentum: Of sgd and muon; a file that leaves it out means 0.95 for muon.
        weight_decay: Decoupled for AdamW and Muon, in the gradient for sgd; a file that leaves it out means 0 for sgd.
        clip_norm: Largest gradient norm; 0 for no clipping.
        warmup_steps: Steps of linear warm-up.
        final_lr_fraction: Share of the learning rate that the cosine leaves at the end.
    """

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.0
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_steps: int = 30
    final_lr_fraction: float = 0.1

    def __post_init__(self) -> None:
        _one_of("optimizer", "name", self.name, ("adamw", "sgd", "muon"))
        if self.lr <= 0:
            raise ConfigError(f"optimizer.lr={self.lr!r}: must be positive; use 0.003")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ConfigError(f"optimizer.betas={list(self.betas)}: must be in [0, 1); use [0.9, 0.95]")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum={self.momentum!r}: must be in [0, 1); use 0 for plain SGD")
        if self.name == "adamw" and self.momentum:
            raise ConfigError(f"optimizer.momentum={self.momentum!r}: must be 0 for name='adamw'; set betas instead")
        if self.name == "sgd" and self.betas != (0.9, 0.95):
            raise ConfigError(f"optimizer.betas={list(self.betas)}: must be left out for name='sgd'; set momentum")
        _at_least("optimizer", "weight_decay", self.weight_decay, 0)
        if self.clip_norm < 0:
            raise ConfigError(f"optimizer.clip_norm={self.clip_norm!r}: must not be negative; use 0 for no clipping")
        _at_least("optimizer", "warmup_steps", self.warmup_steps, 0)
        if not 0 <= self.final_lr_fraction <= 1:
            raise ConfigError(
                f"optimizer.final_lr_fraction={self.final_lr_fraction!r}: must be between 0 and 1; use 0.1 for a tenth"
            )


class TransportConfig(Section, frozen=True, kw_only=True):
    """``[transport]``: how replicas reach each other.

    Attributes:
        kind: "loopback" for one machine, "process_group" for ranks that torchrun has started.
    """

    kind: Literal["loopback", "process_group"] = "loopback"

    def __post_init__(self) -> None:
        _one_of("transport", "kind", self.kind, ("loopback", "process_group"))


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """``[checkpoint]``: what is saved while a run lasts; its end and an interruption always are.

    Attributes:
        every: Steps between two checkpoints; 0 for none but those.
        keep: Complete checkpoints that stay on the disk.
    """

    every: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        _at_least("checkpoint", "every", self.every, 0)
        _at_least("checkpoint", "keep", self.keep, 1)


class LoggingConfig(Section, frozen=True, kw_only=True):
    """``[logging]``: where figures go besides ``metrics.jsonl``, which is always written.

    Attributes:
        to: Any of "tensorboard", "wandb" and "trackio"; each needs the extra of its name, and stays on this machine
            unless the package's own environment variables say otherwise.
        project: Name of the project in wandb and trackio.
    """

    to: tuple[str, ...] = ()
    project: str = "sparseloco"

    def __post_init__(self) -> None:
        for name in self.to:
            _one_of("logging", "to", name, ("tensorboard", "wandb", "trackio"))
        if len(set(self.to)) < len(self.to):
            raise ConfigError(f"logging.to={list(self.to)}: must name each writer once; leave out the others")
        if not self.project:
            raise ConfigError("logging.project='': must name a project; use sparseloco")


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a run, with all defaults spelled out.

    Attributes:
        algorithm: ``[algorithm]``: the preset and all its keywords.
    """

    algorithm: Recipe
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    transport: TransportConfig = TransportConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    def __post_init__(self) -> None:
        if self.optimizer.warmup_steps >= self.train.steps:
            raise ConfigError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps}: must be below train.steps="
                f"{self.train.steps}; shorten the warm-up or train longer"
            )


_INNER_KEYS = ("name", "lr", "betas", "momentum", "weight_decay")
"""Keys of ``[optimizer]`` that make the keyword ``inner`` of a preset."""
_SGD_PRESETS = ("local_sgd", "qsparse_local_sgd")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.3, "weight_decay": 0.0},
    "muon": {"momentum": 0.95},
}
"""By optimizer: what a file that leaves a key out means, where it is not the default of :class:`OptimizerConfig`."""


def optimizer_keys(preset: str) -> tuple[str, ...]:
    """Keys of ``[optimizer]`` that a preset uses.

    Example:
        >>> optimizer_keys("demo")
        ('warmup_steps', 'final_lr_fraction')
    """
    taken = inspect.signature(PRESETS[preset]).parameters
    unused = {*(_INNER_KEYS if "inner" not in taken else ()), *(() if "clip_norm" in taken else ("clip_norm",))}
    return tuple(name for name in OptimizerConfig.__struct_fields__ if name not in unused)


def optimizer_defaults(preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of ``[optimizer]`` that differ from those of :class:`OptimizerConfig`, for a preset and what is given.

    Example:
        >>> optimizer_defaults("local_sgd", {"lr": 1.0})
        {'name': 'sgd', 'lr': 0.3, 'weight_decay': 0.0}
        >>> optimizer_defaults("local_sgd", {"name": "adamw"})
        {}
    """
    name = given.get("name", "sgd" if preset in _SGD_PRESETS else "adamw")
    return dict(_DEFAULTS.get(name, {})) if isinstance(name, str) else {}


def to_table(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The sections of a run as plain values, every default spelled out; keys that its preset does not use left out."""
    table = {"algorithm": {"preset": config.algorithm.preset, **config.algorithm.settings}}
    for section in ("model", "data", "train", "optimizer", "transport", "checkpoint", "logging"):
        table[section] = msgspec.to_builtins(getattr(config, section))
    if not config.model.shape:
        del table["model"]["shape"]  # an empty table says nothing
    used = optimizer_keys(config.algorithm.preset)
    table["optimizer"] = {name: value for name, value in table["optimizer"].items() if name in used}
    return table


def to_toml(config: RunConfig) -> str:
    """A file that ``config.load_config`` reads back into an equal value."""
    return tomli_w.dumps(to_table(config))


def check_rounds(steps: int, inner_steps: int) -> None:
    """Refuse a number of steps that ends in the middle of a round.

    Raises:
        ConfigError: if ``steps`` is no multiple of ``inner_steps``; it names the nearest ones.
    """
    if steps % inner_steps:
        below = steps - steps % inner_steps
        raise ConfigError(
            f"train.steps={steps}: must be a multiple of inner_steps={inner_steps}, or the last steps would never be "
            f"synchronized; use {_either([below, below + inner_steps] if below else [inner_steps])}"
        )

"""What a sharded replica can run: methods that code each chunk alone, so that shards make the payload of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sparseloco.algorithm import Algorithm
from sparseloco.compress import TopK
from sparseloco.errors import ConfigError
from sparseloco.layout import Tiled
from sparseloco.local import InnerSteps
from sparseloco.outer import Sgd
from sparseloco.sharding import Place, check_panels


def check_shards(algorithm: Algorithm, places: Mapping[str, Place]) -> None:
    """Refuse an algorithm, or edges of shards, with which the shards would not make what a whole replica makes.

    Raises:
        ConfigError: naming the part of the algorithm and the reason, or the tensor and the panels that would serve.
    """
    if not any(place.wrapped for place in places.values()):
        return
    count = max(place.num_shards for place in places.values())
    fault = next(_local_faults(algorithm) if count == 1 else _faults(algorithm, count), None)
    if fault is not None:
        raise ConfigError(fault)
    if count == 1:
        return
    layout = algorithm.channel.layout
    assert isinstance(layout, Tiled)
    check_panels(places.items(), layout.panels)


def _local_faults(algorithm: Algorithm) -> Iterator[str]:
    """What does not work on DTensors, be they of one shard."""
    if not isinstance(algorithm.local, InnerSteps):
        yield (
            f"algorithm.local={algorithm.local.name!r}: must be inner_steps on a sharded replica, since only its "
            "optimizer steps every shard by itself; use a method with rounds, such as diloco"
        )


def _faults(algorithm: Algorithm, count: int) -> Iterator[str]:
    """What does not work on ``count`` shards, one sentence each."""
    yield from _local_faults(algorithm)
    channel = algorithm.channel
    # The compressor first: where a method cannot be sharded at all, other panels would not help.
    coder = channel.compressor.values if isinstance(channel.compressor, TopK) else channel.compressor
    if not coder.chunkwise:
        yield (
            f"{'compressor' if coder is channel.compressor else 'values'}={coder.name!r}: must code each chunk alone "
            "and without randomness on a sharded replica; use sign_two_level values, or a method such as diloco"
        )
    if not isinstance(channel.layout, Tiled):
        yield (
            f"layout={channel.layout.name!r}: must cut dim 0 into panels on a sharded replica; "
            f"use panels={count} where the method has that setting"
        )
    for transform in channel.transforms:
        if not transform.chunkwise:
            yield (
                f"transform={transform.name!r}: must map each chunk alone on a sharded replica, since it would need "
                "the norm of all shards; leave it out"
            )
    if not isinstance(algorithm.outer, Sgd):
        yield (
            f"outer={algorithm.outer.name!r}: must be sgd on a sharded replica, whose step is known to need one "
            "number at a time; use Sgd(lr, momentum)"
        )
    if algorithm.sync_buffers:
        yield (
            "sync_buffers=True: must be False on a sharded replica, whose processes hold buffers of their own; "
            "leave buffers private"
        )

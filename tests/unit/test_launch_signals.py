"""Ctrl-C comes to every process of a group, also to one that is still importing what it needs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest

from sparseloco import launch


@pytest.mark.mp
@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs masks of signals")
def test_a_signal_to_a_process_that_starts_is_left_to_its_parent() -> None:
    """It ended the process, and the run with a traceback and `process ended with code -2`."""
    context = multiprocessing.get_context("spawn")
    context.Event()  # as in a run: the process that keeps account of such things has started before
    process = context.Process(target=signal.signal, args=(signal.SIGINT, signal.SIG_IGN))
    with launch._signals_wait():
        process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs masks of signals")
def test_a_signal_to_the_parent_comes_once_all_are_started() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with launch._signals_wait():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            assert not seen
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)

"""A function in a process of its own that needs no new interpreter: for tests that kill it."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import torch


def forked(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a process that calls a function and shares this one's imports, which take longer than most tests.

    CUDA does not work in a forked process: where there is a GPU, the new one imports everything anew.
    """
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    process = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process

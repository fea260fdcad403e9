"""vLLM's model runner V2 on a CPU: what has to be changed in vLLM so that these tests can run it. It is vLLM's default on a GPU, and its
own operations are Triton kernels. Triton's interpreter runs them on a CPU; kvant's operations are those for CPUs, as with V1.

`pytest --model-runner-v2` runs the tests that are marked `runner_v2` with it. The choice is that of a process: Triton decides whether it
interprets a kernel, and vLLM whether it has Triton, while vLLM is imported.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def use() -> None:
    """Makes the engines of this process use model runner V2."""
    assert "vllm.triton_utils" not in sys.modules, "vLLM was imported before, without Triton"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    _show_triton()
    _take_masks_of_integers()
    _keep_asynchronous_scheduling()


def used() -> bool:
    """Whether it was chosen."""
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def check(llm: Any) -> None:
    """That an engine has model runner V2, in the interpreter, and schedules asynchronously where vLLM does so on a GPU."""
    import vllm
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.worker.gpu import input_batch, model_runner

    core = llm.llm_engine.engine_core.engine_core
    assert isinstance(core.model_executor.driver_worker.worker.model_runner, model_runner.GPUModelRunner)
    assert isinstance(input_batch._prepare_prefill_inputs_kernel, InterpretedFunction)
    drafting = llm.llm_engine.vllm_config.speculative_config
    synchronous = drafting is not None and drafting.method == "ngram" and vllm.__version__.startswith("0.32.")
    assert isinstance(core.scheduler, AsyncScheduler) != synchronous


def _show_triton() -> None:
    """vLLM for CPUs uses Triton only if it has a backend named "cpu", which that of PyPI has not: vLLM would put place-holders where its
    kernels are. The interpreter needs no backend."""
    from triton.backends import Backend, backends

    backends.setdefault("cpu", Backend(compiler=None, driver=None))


def _take_masks_of_integers() -> None:
    """Triton's interpreter makes integers of a mask that is combined with a scalar one, and then refuses to load by it. vLLM's search for
    n-grams does so."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def booleans(operation: Any, place: int) -> Any:
        def run(*args: Any, **rest: Any) -> Any:
            mask = args[place]
            if mask.data.dtype != bool:
                args = (*args[:place], TensorHandle(mask.data != 0, tl.int1), *args[place + 1 :])
            return operation(*args, **rest)

        return run

    InterpreterBuilder.create_masked_load = booleans(InterpreterBuilder.create_masked_load, 2)
    InterpreterBuilder.create_masked_store = booleans(InterpreterBuilder.create_masked_store, 3)


def _keep_asynchronous_scheduling() -> None:
    """vLLM schedules asynchronously on a GPU: the next step begins before the tokens of the last one are on the host. On a CPU its
    platform switches that off."""
    from vllm.platforms.cpu import CpuPlatform

    switch_off = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        chosen = config.scheduler_config.async_scheduling
        switch_off(cls, config)
        config.scheduler_config.async_scheduling = chosen

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)

"""vLLM's offline engine with a packed cache. vLLM finds kvant by its plugin; nothing is patched.

python examples/vllm_offline.py [MODEL]    (in an environment with kvant[vllm]; on a CPU: ./scripts/setup --vllm)
"""

import sys

import torch
from vllm import LLM, SamplingParams

from kvant.models import resolve


def main() -> None:
    model = resolve(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    llm = LLM(
        model,
        attention_backend="CUSTOM",
        additional_config={
            "kvant": {"recipe": "int8"}
        },  # kvant-2, kvant-4: with "artifact": a directory of kvant calibrate
        dtype="auto" if torch.cuda.is_available() else "float32",  # not every CPU can multiply 16-bit numbers
        kv_cache_memory_bytes=256 << 20,  # without it, vLLM fills gpu_memory_utilization of the device
        max_model_len=1024,
        max_num_seqs=4,
        enforce_eager=True,  # starts faster; leave it out to serve
    )
    prompts = ["The capital of France is", "Two and two are", "The colour of the sky is"]
    for answer in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8)):
        print(f"{answer.prompt!r} -> {answer.outputs[0].text!r}")


if __name__ == "__main__":  # vLLM starts a process of its own
    main()

"""What of torch and vLLM works on this machine: each stage prints OK or its traceback, and none stops the next.

python3 probe.py [--only STAGE,STAGE] [--out FOLDER]    logs of the engines go to FOLDER
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from pathlib import Path

STAGES = {}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def stage(function):
    STAGES[function.__name__] = function
    return function


@stage
def versions():
    import torch
    import torchvision
    import triton

    print(
        sys.version.split()[0],
        "torch",
        torch.__version__,
        torch.__file__,
        "triton",
        triton.__version__,
        triton.__file__,
    )
    print(
        "cuda",
        torch.version.cuda,
        "available",
        torch.cuda.is_available(),
        torch.cuda.get_device_name(),
        "arch",
        torch.cuda.get_arch_list(),
    )
    print(
        "cudnn",
        torch.backends.cudnn.version(),
        "nccl",
        torch.cuda.nccl.version(),
        "torchvision",
        torchvision.__version__,
    )
    import transformers

    print("transformers", transformers.__version__, transformers.__file__)


@stage
def product():
    import torch

    for kind in (torch.float32, torch.bfloat16, torch.float16):
        a, b = (torch.randn(1024, 1024, device="cuda", dtype=kind) for _ in range(2))
        torch.testing.assert_close((a @ b).float().cpu(), a.float().cpu() @ b.float().cpu(), rtol=3e-2, atol=0.5)
    x = torch.randn(1000, 1000, device="cuda")
    torch.testing.assert_close(x.sort(dim=1).values.cpu(), x.cpu().sort(dim=1).values)
    torch.testing.assert_close(x.softmax(1).cumsum(1).cpu(), x.cpu().softmax(1).cumsum(1), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(torch.linalg.svdvals(x.double()).cpu(), torch.linalg.svdvals(x.double().cpu()))
    big = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big @ big
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        big @ big
    torch.cuda.synchronize()
    print(f"{10 * 2 * 8192**3 / (time.perf_counter() - start) / 1e12:.0f} TFLOP/s in bf16")


@stage
def attention():
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 8, 512, 128, device="cuda", dtype=torch.bfloat16)
    for backend in (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ):
        with sdpa_kernel(backend):
            print(backend, torch.nn.functional.scaled_dot_product_attention(q, q, q).float().norm().item())


@stage
def graph():
    import torch

    x = torch.ones(8, device="cuda")
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured):
        y = x * 2
    captured.replay()
    torch.cuda.synchronize()
    assert y.sum().item() == 16


@stage
def triton_kernel():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def product(a, b, c, N: tl.constexpr):
        rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
        tl.store(c + rows * N + columns, tl.dot(tl.load(a + rows * N + columns), tl.load(b + rows * N + columns)))

    a, b = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty(64, 64, device="cuda")
    product[(1,)](a, b, c, 64)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-2, atol=0.1)


@stage
def compiled():
    import torch

    x = torch.randn(1000, 1000, device="cuda", dtype=torch.bfloat16)
    f = torch.compile(lambda x: torch.nn.functional.silu(x).pow(2).mean(-1) + 1)
    torch.testing.assert_close(f(x), torch.nn.functional.silu(x).pow(2).mean(-1) + 1, rtol=2e-2, atol=2e-2)


@stage
def nccl():
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        x = torch.ones(8, device="cuda")
        dist.all_reduce(x)
        assert x.sum().item() == 8
        dist.destroy_process_group()


@stage
def vllm_operations():
    import torch
    import vllm
    import vllm._custom_ops as ops
    from vllm.platforms import current_platform

    print("vllm", vllm.__version__, vllm.__file__, current_platform, current_platform.get_device_capability())
    x, w = (
        torch.randn(4, 512, device="cuda", dtype=torch.bfloat16),
        torch.ones(512, device="cuda", dtype=torch.bfloat16),
    )
    out = torch.empty_like(x)
    ops.rms_norm(out, x, w, 1e-6)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (512,), w, 1e-6), rtol=2e-2, atol=2e-2)
    import vllm._moe_C_stable_libtorch

    print(
        "_C:",
        len(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")),
        "registrations for CUDA;",
        torch.ops._moe_C.topk_softmax,
    )


@stage
def flash_attention_3():
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    from vllm.vllm_flash_attn.flash_attn_interface import fa_version_unsupported_reason

    print(
        "FA2:",
        fa_version_unsupported_reason(2),
        "FA3:",
        fa_version_unsupported_reason(3),
        "FA4:",
        fa_version_unsupported_reason(4),
    )
    for dim in (64, 80, 96, 128, 192, 256):
        try:
            q = torch.randn(300, 8, dim, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn(300, 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            starts = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
            out = flash_attn_varlen_func(q, k, v, 200, starts, 200, cu_seqlens_k=starts, causal=True, fa_version=3)
            for i, j in ((0, 100), (100, 300)):
                heads = [x[i:j].float().transpose(0, 1)[None] for x in (q, k, v)]
                expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[
                    0
                ].transpose(0, 1)
                torch.testing.assert_close(out[i:j].float(), expected, rtol=3e-2, atol=3e-2)
            print("head_dim", dim, "right")
        except Exception as error:
            print("head_dim", dim, "FAILED", repr(error)[:300])


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def small(name, **changes):
    """The configuration of a transformers model, made small."""
    import transformers

    sizes = {
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    }
    sizes |= {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kind, architecture = name
    config = getattr(transformers, kind)(**{**sizes, **changes}).to_dict()
    return {**config, "architectures": [architecture], "torch_dtype": "bfloat16", "dtype": "bfloat16"}


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
DELTA_NET = {"shared_expert_intermediate_size": 256, "linear_num_value_heads": 8, "linear_num_key_heads": 4}
LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
MODELS = {
    "llama": lambda: LLAMA,
    "qwen3": lambda: small(("Qwen3Config", "Qwen3ForCausalLM"), head_dim=128, num_hidden_layers=2),
    "gemma3": lambda: small(("Gemma3TextConfig", "Gemma3ForCausalLM"), head_dim=256, num_hidden_layers=6),
    "qwen3moe": lambda: small(("Qwen3MoeConfig", "Qwen3MoeForCausalLM"), head_dim=64, num_hidden_layers=2, **MOE),
    "gptoss": lambda: small(
        ("GptOssConfig", "GptOssForCausalLM"), head_dim=64, num_hidden_layers=2, num_local_experts=8
    ),
    "qwen3next": lambda: small(
        ("Qwen3NextConfig", "Qwen3NextForCausalLM"), head_dim=256, num_hidden_layers=4, **MOE, **DELTA_NET
    ),
    "lfm2": lambda: small(("Lfm2Config", "Lfm2ForCausalLM"), **LFM2),
}

ENGINES = {
    "llama_eager": ("llama", {"enforce_eager": True}),
    "llama_graphs": ("llama", {"compilation_config": {**GRAPHS, "cudagraph_capture_sizes": [1, 2, 4, 8]}}),
    "llama_compile": ("llama", {}),
    "llama_fp8": ("llama", {"enforce_eager": True, "kv_cache_dtype": "fp8"}),
    "llama_triton": ("llama", {"enforce_eager": True, "attention_config": {"backend": "TRITON_ATTN"}}),
    "llama_kvant": (
        "llama",
        {"enforce_eager": True, "attention_backend": "CUSTOM", "additional_config": {"kvant": {"recipe": "saw-int4"}}},
    ),
    "llama_kvant_compile": (
        "llama",
        {"attention_backend": "CUSTOM", "additional_config": {"kvant": {"recipe": "saw-int4"}}},
    ),
    **{name: (name, {"enforce_eager": True}) for name in MODELS if name != "llama"},
}


def engine(name):
    """Runs in a process of its own."""
    model, options = ENGINES[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]()))
        from vllm import LLM, SamplingParams

        start = time.perf_counter()
        common = {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": 8,
        }
        common |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**30, "disable_log_stats": True}
        llm = LLM(model=folder, **common, **options)
        ready = time.perf_counter()
        prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 for j in range(40 + 50 * i)]} for i in range(6)]
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False), use_tqdm=False
        )
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert all(len(t) == 12 for t in tokens), tokens
        print(f"RESULT {name}: engine ready in {ready - start:.1f} s; tokens {tokens[0][:6]}", flush=True)


def run_engine(name, folder):
    start = time.time()
    with open(folder / f"{name}.log", "w") as log:
        try:
            environment = {**os.environ, "VLLM_CACHE_ROOT": f"/tmp/vllm-cache-{name}"}
            code = subprocess.run(
                [sys.executable, __file__, "--engine", name], stdout=log, stderr=log, timeout=300, env=environment
            ).returncode
        except subprocess.TimeoutExpired:
            code = "timeout"
    text = (folder / f"{name}.log").read_text(errors="replace")
    result = [line for line in text.splitlines() if line.startswith("RESULT")]
    return f"{'OK' if result else f'FAILED ({code})'} {name} {time.time() - start:.0f} s " + (
        result[0] if result else text[-2500:]
    )


@stage
def engines(folder=Path(".")):
    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        for text in pool.map(lambda name: run_engine(name, folder), ENGINES):
            print(text, flush=True)


@stage
def server(folder=Path(".")):
    with tempfile.TemporaryDirectory() as model, open(folder / "server.log", "w") as log:
        Path(model, "config.json").write_text(json.dumps(LLAMA))
        options = [
            "--load-format",
            "dummy",
            "--skip-tokenizer-init",
            "--enforce-eager",
            "--max-model-len",
            "2048",
            "--port",
            "8123",
        ]
        options += [
            "--gpu-memory-utilization",
            "0.05",
            "--kv-cache-memory-bytes",
            str(2**30),
            "--served-model-name",
            "m",
        ]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(120):
                time.sleep(1)
                try:
                    urllib.request.urlopen("http://127.0.0.1:8123/health", timeout=5)
                    break
                except OSError:
                    if process.poll() is not None:
                        break
            body = {
                "model": "m",
                "prompt": list(range(3, 60)),
                "max_tokens": 8,
                "temperature": 0,
                "detokenize": False,
                "return_token_ids": True,
            }
            request = urllib.request.Request(
                "http://127.0.0.1:8123/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            print(urllib.request.urlopen(request, timeout=60).read()[:600])
        except Exception:
            print((folder / "server.log").read_text(errors="replace")[-2500:])
            raise
        finally:
            process.terminate()
            process.wait(30)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(STAGES))
    parser.add_argument("--engine")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "/tmp")))
    arguments = parser.parse_args()
    if arguments.engine:
        engine(arguments.engine)
        return
    summary = []
    for name in arguments.only.split(","):
        print(f"=== {name}", flush=True)
        start = time.time()
        try:
            STAGES[name](arguments.out) if name in ("engines", "server") else STAGES[name]()
            summary.append(f"{name}: ok, {time.time() - start:.1f} s")
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            summary.append(f"{name}: FAILED, {time.time() - start:.1f} s")
        print(f"=== {summary[-1]}", flush=True)
    print("\n".join(summary))


if __name__ == "__main__":
    main()

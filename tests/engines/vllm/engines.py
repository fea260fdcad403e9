"""Small models, artifacts and vLLM engines for tests."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant import recipes
from kvant.artifact import Artifact
from kvant.engines.vllm import versions
from kvant.engines.vllm.options import block_tokens
from tests.engines.vllm import device, runner_v2
from tests.fitted import made_up_tensors

GROUPS = {"0": "kivi-k2v2-sink", "1": "kitty-pro", "2": "kivi-k4v4", "3": "saw-int4"}  # in blocks of 128 tokens
LAYERS = {"0": "saw-int4", "1": "oscar", "2": "kvant-2", "3": "vecinfer-2"}
HEADS, KV_HEADS, DIM, VOCAB = 4, 2, 64, 512
ONE_GPU = {  # ranks that share it, see one_gpu.py
    "distributed_executor_backend": "mp",
    "worker_cls": "tests.engines.vllm.one_gpu.OneGpuWorker",
    "disable_custom_all_reduce": True,
}
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: ./scripts/setup --vllm"
)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two ranks may share a NUMA node


def release() -> str:
    """Of vLLM, such as 0.32."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def recomputed(size: int) -> int:
    """Tokens of a prefix hit that vLLM computes anew for the hidden states that EAGLE and MTP read: the last block; from 0.33 on
    none."""
    return size if versions.older(release(), "0.33") else 0


def block_of(recipe: str) -> int:
    """Tokens of a block: 64 where a recipe codes tokens one by one, 128 where it codes groups of them."""
    return block_tokens(recipes.get(recipe))


def tiny_model(directory: Path, layers: int = 4, vocab: int = VOCAB) -> Path:
    """A Llama with random weights, large enough for its attention to look at some tokens more than others."""
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=HEADS * DIM,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=2048,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def draft_model(directory: Path, target: Path) -> Path:
    """The target with other weights, by little: its drafts are often right, and often not."""
    import transformers

    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.1)
    model.save_pretrained(directory)
    return directory


def eagle_head(directory: Path, method: str) -> Path:
    """A draft of one layer with random weights for `tiny_model`, as EAGLE's or EAGLE-3's checkpoints hold it."""
    import safetensors.torch

    torch.manual_seed(6)
    hidden, three = HEADS * DIM, method == "eagle3"
    inputs, layer = (2 * hidden, "midlayer") if three else (hidden, "layers.0")
    shapes = {
        "fc.weight": (hidden, 3 * hidden if three else 2 * hidden),
        f"{layer}.self_attn.q_proj.weight": (hidden, inputs),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * DIM, inputs),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * DIM, inputs),
        f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}.mlp.gate_proj.weight": (128, hidden),
        f"{layer}.mlp.up_proj.weight": (128, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, 128),
        **({"lm_head.weight": (VOCAB, hidden)} if three else {}),
    }
    norms = ["post_attention_layernorm", *(["hidden_norm", "input_layernorm"] if three else [])]
    weights = {name: 0.08 * torch.randn(shape) for name, shape in shapes.items()}
    weights |= {f"{layer}.{name}.weight": torch.ones(hidden) for name in norms}
    weights |= {"norm.weight": torch.ones(hidden)} if three else {}
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if three else "LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
        **({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]} if three else {}),
    }
    directory.mkdir()
    safetensors.torch.save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def mimo_like(directory: Path, layers: int = 4) -> Path:
    """A MiMo: a Qwen2 with a layer that predicts the token after the next (MTP), all with random weights."""
    import safetensors.torch
    import transformers

    random_model("Qwen2", directory, layers, head_dim=DIM, tie_word_embeddings=False)
    hidden = HEADS * DIM
    shapes = {
        "input_proj.weight": (hidden, 2 * hidden),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (KV_HEADS * DIM, hidden),
        "self_attn.v_proj.weight": (KV_HEADS * DIM, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.bias": (KV_HEADS * DIM,),
        "self_attn.v_proj.bias": (KV_HEADS * DIM,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (128, hidden),
        "mlp.up_proj.weight": (128, hidden),
        "mlp.down_proj.weight": (hidden, 128),
    }
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
    torch.manual_seed(7)
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    weights |= {f"model.mtp_layers.0.{name}": 0.08 * torch.randn(shape) for name, shape in shapes.items()}
    weights |= {f"model.mtp_layers.0.{name}.weight": torch.ones(hidden) for name in norms}
    safetensors.torch.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    # transformers has no classes for it: checkpoints bring their own
    made = type("MiMoConfig", (transformers.Qwen2Config,), {"model_type": "mimo"})
    base = transformers.Qwen2ForCausalLM
    causal = type("MiMoForCausalLM", (base,), {"config_class": made, "__module__": base.__module__})
    transformers.AutoConfig.register("mimo", made, exist_ok=True)
    transformers.AutoModelForCausalLM.register(made, causal, exist_ok=True)
    return directory


def random_model(family: str, directory: Path, layers: int, **options: Any) -> Path:
    """A model of a family of transformers with random weights."""
    import transformers

    torch.manual_seed(1)
    shared = {
        "vocab_size": VOCAB,
        "hidden_size": HEADS * DIM,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
    }
    made = getattr(transformers, f"{family}ForCausalLM")
    made(made.config_class(**shared | options)).save_pretrained(directory)
    return directory


def gemma_like(directory: Path, layers: int = 12, window: int = 100) -> Path:
    """A Gemma 3: five layers with a sliding window for each one without."""
    return random_model(
        "Gemma3",
        directory,
        layers,
        hidden_size=128,
        head_dim=DIM,
        sliding_window=window,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        query_pre_attn_scalar=DIM,
    )


# Three gated delta nets for each layer with attention, whose heads have 256 channels.
DELTA_NETS = {
    "hidden_size": 128,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def qwen3_next_like(directory: Path, layers: int = 8) -> Path:
    """A Qwen3-Next, with a layer of experts."""
    return random_model(
        "Qwen3Next",
        directory,
        layers,
        **DELTA_NETS,
        mlp_only_layers=list(range(1, layers)),  # vLLM wants experts in one of them
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def qwen3_5_like(directory: Path, layers: int = 8) -> Path:
    """A Qwen3.5, of text alone."""
    return random_model(
        "Qwen3_5",
        directory,
        layers,
        **DELTA_NETS,
    )


def lfm2_like(directory: Path, layers: int = 6) -> Path:
    """An LFM2: two short convolutions for each layer with attention."""
    return random_model(
        "Lfm2",
        directory,
        layers,
        block_auto_adjust_ff_dim=False,
        conv_dim=HEADS * DIM,  # these two are in the files of checkpoints, and read by vLLM alone
        block_dim=HEADS * DIM,
        layer_types=["full_attention" if i % 3 == 2 else "conv" for i in range(layers)],
    )


def falcon_h1_like(directory: Path, layers: int = 3) -> Path:
    """A Falcon-H1: every layer has attention and a Mamba."""
    return random_model(
        "FalconH1",
        directory,
        layers,
        head_dim=DIM,
        mamba_d_ssm=256,
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_d_state=16,
        mamba_n_groups=1,
    )


def made_up_artifacts(
    directory: Path,
    layers: int = 4,
    heads: int = KV_HEADS,
    dim: int = DIM,
    names: Iterable[str] = tuple(LAYERS.values()),
    attention: Iterable[int] | None = None,
) -> list[str]:
    """Artifacts of random tensors for those of these recipes that need one; for the layers of `attention` alone, where given."""
    out = []
    for name in names:
        recipe = recipes.get(name)
        if recipe.calibrated:
            torch.manual_seed(len(out))
            tensors = {layer: made_up_tensors(recipe, heads, dim) for layer in attention or range(layers)}
            Artifact(recipe, heads, dim, layers, tensors).save(directory / name)
            out.append(str(directory / name))
    return out


def engine(model: Path, kvant: dict[str, Any], blocks: int = 200, **other: Any) -> Any:
    """An engine of vLLM with kvant behind its attention, and the recorder in its workers; on the device that was asked
    for."""
    from vllm import LLM

    options: dict[str, Any] = {
        **device.engine_options(),
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "block_size": 64,
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": blocks,
        "kv_cache_memory_bytes": 64 << 20,
        "attention_backend": "CUSTOM",
        "worker_extension_cls": "tests.engines.vllm.recorder.Recorder",
        "additional_config": {"kvant": kvant},
    }
    if device.on_gpu() and other.get("tensor_parallel_size", 1) > 1:
        options |= ONE_GPU
    device.note(kvant)
    made = LLM(str(model), **{**options, **other})
    if device.on_gpu():
        device.check(made)
    elif runner_v2.used():
        runner_v2.check(made)
    return made


def ngrams_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next engine has a process of its own: with numba, which looks for n-grams, in it, this vLLM starts no second one. Model runner
    V2 looks for them in a kernel."""
    if not runner_v2.used():
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def close(llm: Any) -> None:
    """Ends an engine, so that the next one finds a clean process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def prompt(seed: int, count: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=random).tolist()


def run(llm: Any, prompts: list[list[int]], count: int, salt: str | None = None, **other: Any) -> list[Any]:
    """Answers of so many tokens. `salt`: of a tenant, who shares no prefix with another."""
    from vllm import SamplingParams

    settings = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "detokenize": False, **other}
    asked = [{"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts]
    return llm.generate(asked, SamplingParams(**settings), use_tqdm=False)  # type: ignore[no-any-return]


def byte_tokenizer(directory: Path) -> None:
    """A tokenizer of bytes, with a template for chats."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    made.save_pretrained(directory)

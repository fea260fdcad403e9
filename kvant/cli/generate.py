"""kvant generate: a model answers from a packed cache; with several recipes, side by side with the full one."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from typing import Any

from kvant.cli.artifacts import add_artifact_options, artifacts_for
from kvant.cli.common import add_model_options, load_model, print_table, progress, say, tell_reference
from kvant.recipes import DEFAULT


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text from a packed cache",
        description="Generates from a packed cache. With several recipes, compares them with the full cache in a table.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--recipe",
        default=DEFAULT,
        metavar="R[,R...]",
        help=f"a recipe, or several to compare (default {DEFAULT}; the first time, it is fitted to the model)",
    )
    parser.add_argument("--prompt", help="what to ask; needed without --chat")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="go on asking: a line of standard input is a message, an answer re-uses all pages",
    )
    parser.add_argument(
        "--raw", action="store_true", help="feed the prompt as it is, without the model's chat template"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default 64")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default 0)")
    parser.add_argument("--max-cache-tokens", type=int, metavar="N", help="size of the cache; without it, it grows")
    add_artifact_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


@dataclasses.dataclass
class Answer:
    """What one recipe generated, and what its cache took."""

    recipe: str
    text: str
    tokens: list[int]
    bpe: float
    cache_bytes: int
    times_smaller: float  # than a 16-bit cache of the same text
    tokens_per_second: float
    kl: float | None = None
    top1: float | None = None


class _Clock:
    """A streamer that only looks at the time: the first token is the prefill's, the rest are decoded."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def rate(self) -> float:
        """Tokens a second, of the median step: what other programs do now and then is not the cache's."""
        tokens = self.times[1:]  # the first call is the prompt's
        return 1 / statistics.median(b - a for a, b in itertools.pairwise(tokens)) if len(tokens) > 1 else float("nan")


def encode(tokenizer: Any, messages: list[str], raw: bool) -> Any:
    """Token ids [1, n] of messages of user and assistant in turn, in the model's chat template if it has one."""
    if raw or not tokenizer.chat_template:
        return tokenizer("".join(messages), return_tensors="pt")["input_ids"]
    chat = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(messages)]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def answer(model: Any, tokenizer: Any, ids: Any, recipe: Any, artifact: Any, args: argparse.Namespace) -> Answer:
    import torch

    from kvant.engines.hf import Cache
    from kvant.layout import Layout
    from kvant.recipes import get

    cache = Cache(model, recipe, artifact=artifact, max_tokens=args.max_cache_tokens)
    tell_reference(model, cache)
    clock = _Clock()
    torch.manual_seed(args.seed)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=args.max_new_tokens,
        streamer=clock,
        **sampling(args),
    )
    new = out[0, ids.shape[1] :].tolist()
    length = cache.get_seq_length()
    shape = cache.shape
    half = Layout.of(get("full"), shape.heads, shape.head_dim, dtype="bfloat16").sequence_bytes(length) * len(
        shape.layers
    )
    return Answer(
        recipe=recipe.name,
        text=tokenizer.decode(new, skip_special_tokens=True).strip(),
        tokens=new,
        bpe=cache.layout.bits_per_element(),
        cache_bytes=cache.nbytes_used,
        times_smaller=half / cache.nbytes_used,
        tokens_per_second=clock.rate,
    )


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    if args.temperature > 0:
        return {"do_sample": True, "temperature": args.temperature}
    return {"do_sample": False}


def chat(model: Any, tokenizer: Any, recipe: Any, artifact: Any, args: argparse.Namespace) -> int:
    """Answers messages until there are no more; each answer computes only the tokens that the cache does not hold."""
    import torch

    from kvant.engines.hf import Cache
    from kvant.layout import human_bytes

    cache = Cache(model, recipe, artifact=artifact, max_tokens=args.max_cache_tokens)
    tell_reference(model, cache)
    torch.manual_seed(args.seed)
    said: list[str] = []
    turns: list[dict[str, Any]] = []
    given = [] if args.prompt is None else [args.prompt]
    person = sys.stdin.isatty() and not args.json
    while True:
        if not given and person:
            print("> ", end="", flush=True)
        text = given.pop() if given else sys.stdin.readline()
        if not text:
            break
        if not text.strip():
            continue
        said.append(text.rstrip("\n"))
        ids = encode(tokenizer, said, args.raw).to(model.device)
        start = time.perf_counter()
        out = cache.generate(model, ids, max_new_tokens=args.max_new_tokens, **sampling(args))
        seconds = time.perf_counter() - start
        new = out[0, ids.shape[1] :].tolist()
        answer = tokenizer.decode(new, skip_special_tokens=True)
        said.append(answer if args.raw or not tokenizer.chat_template else answer.strip())
        turn = {"prompt": said[-2], "text": answer.strip(), "prompt_tokens": ids.shape[1], "reused": cache.reused}
        turns.append(turn | {"tokens": new, "seconds": seconds, "cache_bytes": cache.nbytes_used})
        if not args.json:
            print(answer.strip(), flush=True)
            say(
                f"{recipe.name}: {cache.reused} of {ids.shape[1]} prompt tokens re-used, {len(new)} new ones in "
                f"{seconds:.1f} s, cache {human_bytes(cache.nbytes_used)}"
            )
    if args.json:
        print(json.dumps({"model": args.model, "recipe": recipe.name, "turns": turns}, indent=2))
    return 0


def compare(model: Any, ids: Any, answers: list[Answer], chosen: list[Any], artifacts: Any) -> None:
    """Fills in KL and top-1 agreement: every recipe reads the full cache's own answer, token by token."""
    import torch

    from kvant.engines.hf import Cache
    from kvant.eval import Windows, evaluate

    reference = next((a for a in answers if a.recipe == "full"), answers[0])
    whole = torch.cat((ids.cpu(), torch.tensor([reference.tokens])), 1)
    if whole.shape[1] - ids.shape[1] < 2:
        return
    with progress("comparing with the full cache") as advance:
        results = evaluate(
            model,
            chosen,
            Windows(whole, ids.shape[1]),
            make_cache=lambda recipe: Cache(model, recipe, artifact=artifacts[recipe.name]),
            progress=advance,
        )
    for found, result in zip(answers, results, strict=True):
        found.kl, found.top1 = result.kl, result.top1


def run(args: argparse.Namespace) -> int:
    from kvant import recipes
    from kvant.layout import human_bytes

    chosen = [recipes.get(name) for name in recipes.split(args.recipe)]
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be positive, got {args.max_new_tokens}")
    if args.temperature < 0:
        raise ValueError(f"--temperature must be at least 0, got {args.temperature}")
    if args.prompt is None and not args.chat:
        raise ValueError("--prompt is missing: give a prompt, or --chat")
    if args.prompt is not None and not args.prompt.strip():
        raise ValueError("--prompt is empty: expected some text")
    if args.chat and len(chosen) > 1:
        raise ValueError(f"--chat takes one recipe, got {len(chosen)}")
    model, tokenizer = load_model(args)
    artifacts = artifacts_for(model, tokenizer, chosen, args)
    if args.chat:
        return chat(model, tokenizer, chosen[0], artifacts[chosen[0].name], args)
    ids = encode(tokenizer, [args.prompt], args.raw).to(model.device)
    answers = []
    for recipe in chosen:
        if len(chosen) > 1:
            say(f"generating from the {recipe.name} cache")
        answers.append(answer(model, tokenizer, ids, recipe, artifacts[recipe.name], args))
    if len(chosen) > 1:
        compare(model, ids, answers, chosen, artifacts)
    if args.json:
        data = {"model": args.model, "prompt": args.prompt, "prompt_tokens": ids.shape[1]}
        print(json.dumps({**data, "results": [dataclasses.asdict(a) for a in answers]}, indent=2))
        return 0
    if len(answers) == 1:
        (only,) = answers
        print(only.text)
        say(
            f"{only.recipe}: {len(only.tokens)} tokens at {only.tokens_per_second:.1f}/s, {only.bpe:.3f} bits per number, "
            f"cache {human_bytes(only.cache_bytes)}, {only.times_smaller:.2f} times smaller than 16-bit"
        )
        return 0
    columns = [("recipe", "left"), ("bits", "right"), ("cache", "right"), ("smaller", "right"), ("KL", "right")]
    columns += [("top-1", "right"), ("tokens/s", "right")]
    rows = []
    for a in answers:
        kl, top1 = ("-" if a.kl is None else f"{max(a.kl, 0.0):.4f}"), ("-" if a.top1 is None else f"{a.top1:.0%}")
        size = human_bytes(a.cache_bytes)
        rows.append([a.recipe, f"{a.bpe:.2f}", size, f"{a.times_smaller:.2f}x", kl, top1, f"{a.tokens_per_second:.1f}"])
    dtype = str(model.dtype).removeprefix("torch.")
    caption = (
        f"bits per cached number; cache of {ids.shape[1]} prompt tokens and the answer; smaller than a 16-bit cache "
        f"(full here is {dtype}); KL and top-1: next-token distributions against the full cache on its own answer"
    )
    print_table("", columns, rows, caption)
    for a in answers:
        print(f"{a.recipe}: {' '.join(a.text.split())}\n")
    return 0

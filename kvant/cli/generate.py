"""kvant generate: generates from a packed cache; with several recipes, compares them with the full cache."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvant.chats import templated
from kvant.cli.artifact_options import add_artifact_options, artifacts_for, asked_recipes
from kvant.cli.common import (
    add_json_option,
    add_model_options,
    against_16_bit,
    load_model,
    nothing_packed,
    packed_tokens,
    print_table,
    progress,
    say,
    shown_kl,
    tell_reference,
)
from kvant.cli.parsers import tokens

if TYPE_CHECKING:
    from kvant.artifact import Artifact
    from kvant.recipe import Recipe


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        examples=(
            'kvant generate --prompt "Why is the sky blue?"',
            'kvant generate --recipe full,kvant-4,kvant-2 --prompt "Why is the sky blue?"',
        ),
        help="generate text from a packed cache",
        description="Generates from a packed cache and streams the text. With several recipes, compares them with the "
        "full cache in a table.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--recipe",
        metavar="R[,R...]",
        help="a recipe, or several to compare (default: the best recipe whose verdict for this model is good, else kivi-k4v4)",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt; required without --chat")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="a conversation: every line of standard input is a message; pages of earlier messages are reused",
    )
    parser.add_argument(
        "--raw", action="store_true", help="feed the prompt as it is, without the model's chat template"
    )
    parser.add_argument("--max-new-tokens", type=tokens, default=64, metavar="N", help="default 64; 2k is 2048")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of sampling (default 0)")
    parser.add_argument("--max-cache-tokens", type=tokens, metavar="N", help="size of the cache (default: it grows)")
    parser.add_argument(
        "--unfit-anyway", action="store_true", help="generate even if the recipe's verdict for this model is unfit"
    )
    add_artifact_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


@dataclasses.dataclass
class Answer:
    """The text that one recipe generated, and the size of its cache."""

    recipe: str
    text: str
    tokens: list[int]
    bpe: float
    cache_bytes: int
    times_smaller: float  # compared with a 16-bit cache of the same text
    tokens_per_second: float
    packed_tokens: int  # tokens in packed pages; the others are in full precision
    kl: float | None = None
    top1: float | None = None


class Words:
    """A streamer for transformers: writes the answer's text token by token and records the time of each. The first call is for
    the prompt, the second for the token of the prefill, the others for decoded tokens. White space around the answer is
    dropped."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object] | None) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.times: list[float] = []
        self.tokens: list[int] = []  # tokens since the last line end
        self.shown = 0  # characters of their text that were written
        self.held = ""  # white space that is written when a word follows
        self.begun = False

    def __enter__(self) -> Words:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None and self.begun and self.write is not None:
            self.write("\n")  # the error message starts on a new line

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 1 or self.write is None:
            return
        self.tokens += value.flatten().tolist()
        text = self._text()
        if text.endswith("\n"):
            self._hand_on(text[self.shown :])
            self.tokens, self.shown = [], 0
        else:  # an incomplete UTF-8 character at the end is decoded as U+FFFD
            self._show_until(text, len(text.rstrip("\ufffd")))

    def end(self) -> None:
        if self.write is not None:
            text = self._text()
            self._show_until(text, len(text))
            self.tokens, self.shown = [], 0

    def _text(self) -> str:
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))

    def _show_until(self, text: str, stop: int) -> None:
        if stop > self.shown:
            self._hand_on(text[self.shown : stop])
            self.shown = stop

    def _hand_on(self, text: str) -> None:
        assert self.write is not None
        text = self.held + text
        if not self.begun:
            text = text.lstrip()
        word = text.rstrip()
        self.held = text[len(word) :]
        if word:
            self.begun = True
            self.write(word)

    @property
    def rate(self) -> float:
        """Tokens per second of the median step, so that interruptions by other processes do not count."""
        tokens = self.times[1:]
        return 1 / statistics.median(b - a for a, b in itertools.pairwise(tokens)) if len(tokens) > 1 else float("nan")


def out(text: str) -> None:
    """Writes to standard output and flushes."""
    print(text, end="", flush=True)


def out_in_a_line(text: str) -> None:
    """As `out`, with line ends replaced by spaces."""
    if text == "\n":
        out(text)
        return
    out((" " if text[:1].isspace() else "") + " ".join(text.split()))


def encode(tokenizer: Any, messages: list[str], raw: bool) -> Any:
    """Token ids [1, n] of alternating messages of user and assistant, in the model's chat template if it has one."""
    if raw or not tokenizer.chat_template:
        return tokenizer("".join(messages), return_tensors="pt")["input_ids"]
    chat = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(messages)]
    return templated(tokenizer, chat, "the prompt", add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def answer_room(config: Any, prompt: int, new: int) -> int:
    """How many of `new` tokens an answer to a prompt may have. A prompt that fills the model's context is refused; an answer that the
    context would end is said to end there, and so is what only RoPE scaling makes fit."""
    from kvant.shape import context_of

    context = context_of(config)
    if context is None:
        return new
    if prompt >= context:
        raise ValueError(f"the prompt has {prompt:,} tokens, and the model {context:,} positions for prompt and answer")
    if prompt + new > context:
        new = context - prompt
        say(
            f"the answer ends after {new:,} tokens: the model has {context:,} positions, and the prompt takes {prompt:,}"
        )
    positions = config.get_text_config(decoder=True).max_position_embeddings
    if prompt + new > positions:
        say(f"the model has {positions:,} positions: only its RoPE scaling reaches {prompt + new:,} tokens")
    return new


def answer(
    model: Any,
    tokenizer: Any,
    ids: Any,
    recipe: Recipe,
    artifact: Artifact | None,
    args: argparse.Namespace,
    write: Callable[[str], object] | None,
) -> Answer:
    """Generates one recipe's answer; `write` is called with its text as it is generated."""
    import torch

    from kvant.engines.hybrid import cache_for, packed_of
    from kvant.layout import Layout
    from kvant.recipes import get

    cache = cache_for(model, recipe, artifact=artifact, max_tokens=args.max_cache_tokens)
    packed = packed_of(cache)
    tell_reference(model, packed)
    words = Words(tokenizer, write)
    torch.manual_seed(args.seed)
    with words:
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=args.max_new_tokens,
            streamer=words,
            **sampling(args),
        )
    new = whole[0, ids.shape[1] :].tolist()
    length, shape = packed.get_seq_length(), packed.shape
    half = Layout.of(get("full"), shape.heads, shape.head_dim, dtype="bfloat16").sequence_bytes(length) * len(
        shape.layers
    )
    return Answer(
        recipe=recipe.name,
        text=tokenizer.decode(new, skip_special_tokens=True).strip(),
        tokens=new,
        bpe=packed.layouts.bits_per_element(),
        cache_bytes=packed.nbytes_used,
        times_smaller=half / packed.nbytes_used,
        tokens_per_second=words.rate,
        packed_tokens=packed_tokens(recipe, length),
    )


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    if args.temperature > 0:
        return {"do_sample": True, "temperature": args.temperature}
    return {"do_sample": False}


def chat(model: Any, tokenizer: Any, recipe: Recipe, artifact: Artifact | None, args: argparse.Namespace) -> int:
    """Answers messages until there are no more; each answer computes only the tokens that the cache does not hold."""
    import torch

    from kvant.engines.hf import Cache
    from kvant.layout import human_bytes

    cache = Cache(model, recipe, artifact=artifact, max_tokens=args.max_cache_tokens)
    tell_reference(model, cache)
    torch.manual_seed(args.seed)
    code = 0
    said: list[str] = []
    turns: list[dict[str, Any]] = []
    given = [] if args.prompt is None else [args.prompt]
    person = sys.stdin.isatty() and not args.json
    while True:
        if not given and person:
            print("> ", end="", flush=True)
        text = given.pop() if given else sys.stdin.readline()
        if not text:
            if person:
                print()  # end the line of the prompt sign
            break
        if not text.strip():
            continue
        check_text(text, "standard input")
        said.append(text.rstrip("\n"))
        ids = encode(tokenizer, said, args.raw).to(model.device)
        try:
            new_tokens = answer_room(model.config, ids.shape[1], args.max_new_tokens)
        except ValueError as error:  # the turns so far are told of all the same
            say(f"the chat ends: {error}")
            code = 2
            break
        start = time.perf_counter()
        words = Words(tokenizer, None if args.json else out)
        with words:
            whole = cache.generate(model, ids, max_new_tokens=new_tokens, streamer=words, **sampling(args))
        seconds = time.perf_counter() - start
        new = whole[0, ids.shape[1] :].tolist()
        answer = tokenizer.decode(new, skip_special_tokens=True)
        said.append(answer if args.raw or not tokenizer.chat_template else answer.strip())
        turn = {"prompt": said[-2], "text": answer.strip(), "prompt_tokens": ids.shape[1], "reused": cache.reused}
        turns.append(turn | {"tokens": new, "seconds": seconds, "cache_bytes": cache.nbytes_used})
        if not args.json:
            print(flush=True)
            say(
                f"{recipe.name}: {cache.reused} of {ids.shape[1]} prompt tokens re-used, {len(new)} new ones in "
                f"{seconds:.1f} s, cache {human_bytes(cache.nbytes_used)}"
            )
    if args.json:
        print(json.dumps({"model": args.model, "recipe": recipe.name, "turns": turns}, indent=2))
    return code


def compare(model: Any, ids: Any, answers: list[Answer], chosen: list[Any], artifacts: Any) -> None:
    """Fills in KL and top-1 agreement: every recipe is fed the full cache's answer, token by token."""
    import torch

    from kvant.engines.hybrid import cache_for
    from kvant.eval import Segments, evaluate

    reference = next((a for a in answers if a.recipe == "full"), answers[0])
    whole = torch.cat((ids.cpu(), torch.tensor([reference.tokens])), 1)
    if whole.shape[1] - ids.shape[1] < 2:
        return
    with progress("comparing with the full cache") as advance:
        results = evaluate(
            model,
            chosen,
            Segments(whole, ids.shape[1]),
            make_cache=lambda recipe: cache_for(model, recipe, artifact=artifacts[recipe.name]),
            progress=advance,
        )
    for found, result in zip(answers, results, strict=True):
        found.kl, found.top1 = result.kl, result.top1


def named(args: argparse.Namespace) -> list[Recipe] | None:
    """The recipes that --recipe names, and those of --artifact that are not in any list; None without --recipe."""
    return None if args.recipe is None else asked_recipes(args)


def decide(
    model: Any, tokenizer: Any, asked: list[Recipe] | None, args: argparse.Namespace
) -> tuple[list[Recipe], Mapping[str, Artifact | None]]:
    """Chooses the recipes and their artifacts. A single recipe is checked once, and refused where it is unfit; several are compared
    and not checked. Without --recipe nothing is measured, so that the answer starts at once: the choice is the best recipe
    with a stored verdict good for this model, or one that needs neither a fit nor a check."""
    from kvant import recipes
    from kvant.artifact import Artifact
    from kvant.engines.fingerprint import fingerprint
    from kvant.eval.choose import cached_choice, require_fit
    from kvant.shape import ModelShape

    if asked is None and not args.artifact:
        choice = cached_choice(fingerprint(model))
        if choice is not None:
            say(choice.reason)
            return [choice.recipe], {choice.recipe.name: choice.artifact}
        plain = recipes.plain(ModelShape.of(model, hybrid=True).head_dim)
        say(
            f"{plain.name}: needs no fit and tolerates large key means; kvant check --model {args.model} --choose measures, once, "
            "whether a recipe with fewer bits is good for this model"
        )
        return [plain], {plain.name: None}
    chosen = asked or [Artifact.load(args.artifact[0]).recipe]
    artifacts = artifacts_for(model, tokenizer, chosen, args)
    if len(chosen) == 1 and not args.unfit_anyway:
        require_fit(model, tokenizer, chosen[0], artifacts[chosen[0].name], "--unfit-anyway", say)
    return chosen, artifacts


def check_text(text: str, what: str) -> None:
    """Refuses text that was not read as UTF-8: Python keeps such bytes as surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{what}: expected text in UTF-8") from None


def run(args: argparse.Namespace) -> int:
    asked = named(args)
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature must be a finite number of at least 0, got {args.temperature}")
    if args.prompt is None and not args.chat:
        raise ValueError("--prompt is missing: give a prompt, or --chat")
    if args.prompt is not None and not args.prompt.strip():
        raise ValueError("--prompt is empty: expected some text")
    if args.prompt is not None:
        check_text(args.prompt, "--prompt")
    if args.chat and asked and len(asked) > 1:
        raise ValueError(f"--chat takes one recipe, got {len(asked)}")
    model, tokenizer = load_model(args)
    ids = None
    if not args.chat:
        ids = encode(tokenizer, [args.prompt], args.raw).to(model.device)
        args.max_new_tokens = answer_room(model.config, ids.shape[1], args.max_new_tokens)
    chosen, artifacts = decide(model, tokenizer, asked, args)
    if ids is None:
        return chat(model, tokenizer, chosen[0], artifacts[chosen[0].name], args)
    many = len(chosen) > 1
    answers = []
    for recipe in chosen:
        if many and not args.json:
            out(f"{recipe.name}: ")
        write = None if args.json else out_in_a_line if many else out
        answers.append(answer(model, tokenizer, ids, recipe, artifacts[recipe.name], args, write))
        if not args.json:
            out("\n\n" if many else "\n")
    if many:
        compare(model, ids, answers, chosen, artifacts)
    if args.json:
        data = {"model": args.model, "prompt": args.prompt, "prompt_tokens": ids.shape[1]}
        print(json.dumps({**data, "results": [dataclasses.asdict(a) for a in answers]}, indent=2))
    elif many:
        print_answers(answers, chosen, ids.shape[1], str(model.dtype).removeprefix("torch."))
    else:
        say(summary(answers[0], chosen[0], ids.shape[1]))
    return 0


def cached(found: Answer, prompt_tokens: int) -> int:
    """Tokens in the cache: all but the last one, which was not fed to the model."""
    return prompt_tokens + len(found.tokens) - 1


def summary(found: Answer, recipe: Recipe, prompt_tokens: int) -> str:
    """The line that is printed after an answer."""
    from kvant.layout import human_bytes

    rate = f" at {found.tokens_per_second:.1f}/s" if found.tokens_per_second == found.tokens_per_second else ""
    size = f"cache {human_bytes(found.cache_bytes)}, {against_16_bit(found.times_smaller)}"
    text = f"{found.recipe}: {len(found.tokens)} tokens{rate}, {found.bpe:.3f} bits per number, {size}"
    if not found.packed_tokens:
        return f"{found.recipe}: {len(found.tokens)} tokens{rate}, {size}; {nothing_packed(recipe, cached(found, prompt_tokens))}"
    return text


def print_answers(answers: list[Answer], chosen: list[Recipe], prompt_tokens: int, dtype: str) -> None:
    """Prints a table that compares the recipes."""
    from kvant.layout import human_bytes

    columns = [("recipe", "left"), ("bits", "right"), ("cache", "right"), ("smaller", "right"), ("KL", "right")]
    columns += [("top-1", "right"), ("tokens/s", "right")]
    rows, notes = [], []
    for a, recipe in zip(answers, chosen, strict=True):
        kl, top1 = ("-" if a.kl is None else f"{shown_kl(a.kl):.4f}"), ("-" if a.top1 is None else f"{a.top1:.0%}")
        if not a.packed_tokens:
            kl = top1 = "-"
            notes.append(
                f"{a.recipe}: {nothing_packed(recipe, cached(a, prompt_tokens))}; a longer text would show its KL"
            )
        size = human_bytes(a.cache_bytes)
        rows.append([a.recipe, f"{a.bpe:.2f}", size, f"{a.times_smaller:.2f}x", kl, top1, f"{a.tokens_per_second:.1f}"])
    caption = (
        f"bits per cached number; cache of {prompt_tokens} prompt tokens and the answer; times smaller than a 16-bit cache, below 1 "
        f"is larger (full here is {dtype}); KL and top-1: next-token distributions against the full cache, over its answer"
    )
    print_table("", columns, rows, caption)
    for note in notes:
        say(note)

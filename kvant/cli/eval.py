"""kvant eval: the quality of recipes, on the same tokens, through the real packed cache."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.cli.artifact_options import add_artifact_options, artifacts_for, asked_recipes
from kvant.cli.common import (
    add_json_file_option,
    add_model_options,
    check_writable,
    load_model,
    nothing_packed,
    packed_tokens,
    print_table,
    progress,
    read_source,
    say,
    shown_kl,
    tell_reference,
    write_json,
)
from kvant.cli.html import add_html_options, shape_of, target_of
from kvant.cli.parsers import tokens, tokens_from_zero
from kvant.cli.tasks import add_task_options, run_tasks

if TYPE_CHECKING:
    from kvant.eval.segments import Text
    from kvant.eval.teacher import Result
    from kvant.recipe import Recipe


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        examples=(
            "kvant eval --recipe saw-int4,kvant-2 --text book.txt,chats.jsonl",
            "kvant eval --recipe kvant-2 --task gsm8k,needle:length=8192 --html report.html",
        ),
        help="measure quality against the full cache",
        description="With --text: teacher-forced over segments of a text, next-token KL, top-1 agreement and perplexity of each "
        "recipe. With --task: answers that the model writes, scored, beside the full cache.",
    )
    add_model_options(parser)
    parser.add_argument("--recipe", metavar="R[,R...]", help="recipes, or all (default: those of --artifact)")
    parser.add_argument(
        "--text",
        action="append",
        metavar="FILE[,...]",
        help="UTF-8 texts, or chats (.jsonl), of which the answers are scored",
    )
    add_task_options(parser)
    parser.add_argument(
        "--context", type=tokens, default=1536, metavar="N", help="tokens per segment, 2k is 2048 (default 1536)"
    )
    parser.add_argument(
        "--tokens", type=tokens, default=1024, metavar="T", help="tokens to score of each text (default 1024)"
    )
    parser.add_argument(
        "--prompt",
        type=tokens,
        metavar="P",
        help="tokens of a segment that are prefilled (default a third)",
    )
    parser.add_argument(
        "--chunk", type=tokens, default=1, metavar="C", help="tokens fed at a time (default 1, which is decode)"
    )
    parser.add_argument(
        "--stepwise", action="store_true", help="feed tokens one by one for real (slow, the same up to rounding)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also print errors by layer and by length of context",
    )
    parser.add_argument(
        "--offset", type=tokens_from_zero, default=0, metavar="N", help="add N to all positions (default 0)"
    )
    parser.add_argument(
        "--batch", type=int, default=8, metavar="B", help="segments or chats that form one batch (default 8)"
    )
    add_artifact_options(parser)
    add_json_file_option(parser)
    add_html_options(parser)
    parser.set_defaults(run=run)


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """A long text's token ids, without the warning that it is longer than the model's context."""
    return list(tokenizer(text, verbose=False)["input_ids"])


def text_names(asked: Sequence[str]) -> list[str]:
    """Files that --text names: repeated, or with commas between them. A file whose name has commas is taken whole."""
    out = []
    for names in asked:
        out += [names] if Path(names).exists() else [name for name in names.split(",") if name]
    if not out:
        raise ValueError("--text: expected one or more files")
    return out


@dataclasses.dataclass(frozen=True)
class Scored:
    """One text of --text: what is scored of it, and how the report and the table describe it."""

    name: str
    text: Text
    facts: dict[str, Any]
    title: str


def scored_texts(args: argparse.Namespace) -> list[Scored]:
    """What is scored of every text. The weights are not read: wrong files are refused before that."""
    from kvant import models
    from kvant.chats import Chats
    from kvant.eval.segments import ChatSegments, Segments
    from kvant.shape import context_of

    sources = [(name, read_source(name)) for name in text_names(args.text)]
    tokenizer = models.tokenizer_of(args.model, say)
    if args.calibration_text is not None:
        calibration = read_source(args.calibration_text, "--calibration-text")
        if isinstance(calibration, Chats):
            calibration.check(tokenizer)
    longest = context_of(models.config_of(args.model, say))
    if longest is not None and args.offset >= longest:
        raise ValueError(f"--offset {args.offset}: the model has {longest} positions")
    out = []
    for name, source in sources:
        if isinstance(source, Chats):
            chats = ChatSegments.of(source.encode(tokenizer), args.tokens, longest)
            facts = {"kind": "chat", "text_sha256": source.digest, "chats": len(chats.rows)}
            title = f"{name}: {len(chats.rows)} chats of {chats.length} tokens on average, {chats.tokens} tokens of answers scored"
            out.append(Scored(name, chats, facts, title))
        else:
            ids = tokenize(tokenizer, source)
            try:
                segments = Segments.over(ids, args.context, args.tokens, args.prompt, tokenizer.bos_token_id)
            except ValueError as error:
                raise ValueError(f"--text {name!r}: {error}") from None
            if longest is not None and args.offset + args.context > longest:
                shifted = f" and --offset {args.offset}" if args.offset else ""
                raise ValueError(f"--context {args.context}{shifted}: the model has {longest} positions")
            facts = {"kind": "text", "text_sha256": hashlib.sha256(source.encode()).hexdigest()}
            facts |= {"context": args.context, "prompt": segments.prompt}
            title = (
                f"{name}: {len(segments.ids)} segments of {args.context} tokens, {segments.prompt} of them prompt, "
                f"{segments.tokens} scored"
            )
            out.append(Scored(name, segments, facts, title))
    return out


def run(args: argparse.Namespace) -> int:
    if (args.text is None) == (args.task is None):
        raise ValueError(
            "give --text FILE to compare next-token distributions, or --task T to compare answers: one of the two"
        )
    if args.task is not None:
        return run_tasks(args)
    chosen = asked_recipes(args)
    check_writable(args.json, "--json")
    page = target_of(args)
    if args.batch < 1:
        raise ValueError(f"--batch must be positive, got {args.batch}")
    texts = scored_texts(args)
    model, tokenizer = load_model(args)
    from kvant.engines.hybrid import cache_for, packed_of
    from kvant.eval import evaluate
    from kvant.layouts import Layouts
    from kvant.shape import ModelShape

    shape = ModelShape.of(model, hybrid=True)
    for recipe in chosen:
        # refuses what the model cannot take, before the work starts
        Layouts.of(recipe, len(shape.attention_layers), shape.heads, shape.head_dim)
    artifacts = artifacts_for(model, tokenizer, chosen, args)
    for recipe in chosen:
        cache = cache_for(model, recipe, artifact=artifacts[recipe.name], first_position=args.offset)
        tell_reference(model, packed_of(cache))
    common = {
        "model": args.model,
        "shape": shape_of(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "chunk": args.chunk,
        "offset": args.offset,
    }
    entries: list[dict[str, Any]] = []
    for scored in texts:
        say(scored.title)
        with progress("evaluating") as advance:
            results = evaluate(
                model,
                chosen,
                scored.text,
                args.chunk,
                args.batch,
                make_cache=lambda recipe: cache_for(
                    model, recipe, artifact=artifacts[recipe.name], first_position=args.offset
                ),
                progress=advance,
                stepwise=args.stepwise,
                offset=args.offset,
                profile=args.profile,
            )
        measured = {"tokens": scored.text.tokens, "mean_length": scored.text.length}
        found = [dataclasses.asdict(result) for result in results]
        for each in found:
            each["kl_se"] = None if math.isnan(each["kl_se"]) else each["kl_se"]  # of one token there is none
        entries.append({"text": scored.name, **scored.facts, **measured, "results": found})
        report = {**common, **(entries[0] if len(texts) == 1 else {}), "texts": entries}
        print_results(results, scored)
        tell_what_is_not_packed(chosen, scored.text)
        if args.profile:
            for result in results:
                print_profile(result, shape.attention_layers)
        if args.json:  # after every text, so that an interrupted run keeps what it has
            write_json(args.json, report)
        if page is not None:
            page.write(report)
    return 0


def print_results(results: Sequence[Result], scored: Scored) -> None:
    """One text's table."""
    columns = [("recipe", "left"), ("bits", "right"), ("KL", "right"), ("± se", "right"), ("top-1", "right")]
    columns += [("perplexity", "right"), ("attention error", "right"), ("seconds", "right")]
    rows = [
        [
            r.recipe,
            f"{r.bpe:.3f}",
            f"{shown_kl(r.kl):.5f}",
            "-" if math.isnan(r.kl_se) else f"{r.kl_se:.5f}",
            f"{r.top1:.1%}",
            f"{r.ppl:.3f}",
            f"{r.attn_rel_mse:.5f}",
            f"{r.seconds:.0f}",
        ]
        for r in results
    ]
    where = "the chats' mean length" if scored.text.ragged else "this context"
    caption = f"{scored.text.tokens} tokens; bits with windows and partly filled pages at {where}"
    print_table(scored.title, columns, rows, caption)


def tell_what_is_not_packed(chosen: Sequence[Recipe], text: Text) -> None:
    """Says so where scored tokens read nothing packed: a recipe loses nothing on them, whatever it would lose later."""
    lengths = text.lengths
    longest = max(lengths)
    remedy = "longer chats" if text.ragged else "a longer --context"
    for recipe in chosen:
        early = sum(count for n, count in lengths.items() if not packed_tokens(recipe, n))
        if early == text.tokens:
            say(f"{recipe.name}: {nothing_packed(recipe, longest)}; its KL is not meaningful, use {remedy}")
        elif early:
            say(f"{recipe.name}: {early / text.tokens:.0%} of the scored tokens read nothing packed; use {remedy}")


def print_profile(result: Result, numbers: Sequence[int]) -> None:
    """Errors of one recipe by layer, and by length of context. `numbers`: the model's numbers of the layers with attention."""
    from kvant.eval.profile import METRICS

    profile = result.profile
    assert profile is not None
    headings = ("attention KL", "keys", "values", "logits", "attention output")
    columns = [(heading, "right") for heading in headings]
    rows = [
        [str(number), *(f"{profile.layers[metric][place]:.3g}" for metric in METRICS)]
        for place, number in enumerate(numbers)
    ]
    caption = "attention KL: full cache || recipe; the others: squared error over energy, logits without their mean"
    print_table(f"{result.recipe} by layer", [("layer", "right"), *columns], rows, caption)
    rows = [
        [f"{end:,}", *(f"{sum(x := profile.by_length[metric][i]) / len(x):.3g}" for metric in METRICS)]
        for i, end in enumerate(profile.lengths)
    ]
    print_table(
        f"{result.recipe} by length of context",
        [("tokens, up to", "right"), *columns],
        rows,
        "mean over layers; --json has layers and KV heads",
    )

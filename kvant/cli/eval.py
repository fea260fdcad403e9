"""kvant eval: what recipes cost in quality, on the same tokens, through the real packed cache."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.cli.artifact_options import add_artifact_options, artifacts_for
from kvant.cli.common import (
    add_model_options,
    check_writable,
    load_model,
    nothing_packed,
    packed_tokens,
    print_table,
    progress,
    read_text,
    say,
    shown_kl,
    tell_reference,
    write_json,
)
from kvant.cli.html import add_html_options, shape_of, target_of
from kvant.cli.tasks import add_task_options, run_tasks

if TYPE_CHECKING:
    from kvant.eval.teacher import Result


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure quality against the full cache",
        description="With --text: teacher-forced over segments of a text, next-token KL, top-1 agreement and perplexity of each "
        "recipe. With --task: answers that the model writes, scored, beside the full cache. Examples: kvant eval --recipe "
        "saw-int4,int4 --text book.txt; kvant eval --recipe kvant-2 --task gsm8k,needle:length=8192",
    )
    add_model_options(parser)
    parser.add_argument("--recipe", required=True, metavar="R[,R...]", help="recipes, or all")
    parser.add_argument("--text", metavar="FILE", help="a UTF-8 text")
    add_task_options(parser)
    parser.add_argument("--context", type=int, default=1536, metavar="N", help="tokens per segment (default 1536)")
    parser.add_argument("--tokens", type=int, default=1024, metavar="T", help="tokens to score in all (default 1024)")
    parser.add_argument(
        "--prompt", type=int, metavar="P", help="tokens per segment that are prefilled (default a third)"
    )
    parser.add_argument(
        "--chunk", type=int, default=1, metavar="C", help="tokens fed at a time; 1 (default) is decode, token by token"
    )
    parser.add_argument(
        "--stepwise", action="store_true", help="with --chunk 1: feed tokens one by one for real (slow, same result)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also print attention and logit errors layer by layer, to see a fragile one",
    )
    parser.add_argument("--offset", type=int, default=0, metavar="N", help="add N to all positions (default 0)")
    parser.add_argument("--batch", type=int, default=8, metavar="B", help="segments that form one batch (default 8)")
    add_artifact_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    add_html_options(parser)
    parser.set_defaults(run=run)


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """A long text's token ids, without the warning that it is longer than the model's context."""
    return list(tokenizer(text, verbose=False)["input_ids"])


def run(args: argparse.Namespace) -> int:
    if (args.text is None) == (args.task is None):
        raise ValueError(
            "give --text FILE to compare next-token distributions, or --task T to compare answers: one of the two"
        )
    if args.task is not None:
        return run_tasks(args)
    from kvant import recipes

    chosen = [recipes.get(name) for name in recipes.split(args.recipe)]
    check_writable(args.json, "--json")
    page = target_of(args)
    if args.chunk < 1 or args.batch < 1:
        raise ValueError(f"--chunk and --batch must be positive, got {args.chunk} and {args.batch}")
    text = read_text(args.text)
    model, tokenizer = load_model(args)
    from kvant.engines.hf import Cache, ModelShape
    from kvant.eval import Segments, evaluate
    from kvant.layout import Layout

    segments = Segments.over(tokenize(tokenizer, text), args.context, args.tokens, args.prompt)
    shape = ModelShape.of(model)
    for recipe in chosen:
        Layout.of(recipe, shape.heads, shape.head_dim)  # refuses what the model cannot take, before the work starts
    artifacts = artifacts_for(model, tokenizer, chosen, args)
    for recipe in chosen:
        tell_reference(model, Cache(model, recipe, artifact=artifacts[recipe.name], first_position=args.offset))
    say(
        f"{len(segments.ids)} segments of {args.context} tokens, {segments.prompt} of them prompt, {segments.tokens} scored"
    )
    with progress("evaluating") as advance:
        results = evaluate(
            model,
            chosen,
            segments,
            args.chunk,
            args.batch,
            make_cache=lambda recipe: Cache(model, recipe, artifact=artifacts[recipe.name], first_position=args.offset),
            progress=advance,
            stepwise=args.stepwise,
            offset=args.offset,
            profile=args.profile,
        )
    report = {
        "model": args.model,
        "shape": shape_of(model),
        "text": Path(args.text).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "context": args.context,
        "prompt": segments.prompt,
        "chunk": args.chunk,
        "tokens": segments.tokens,
        "offset": args.offset,
        "results": [dataclasses.asdict(result) for result in results],
    }
    if args.json:
        write_json(args.json, report)
    if page is not None:
        from kvant.report import report_of

        page.write(report_of(report, "results"))
    columns = [("recipe", "left"), ("bits", "right"), ("KL", "right"), ("± se", "right"), ("top-1", "right")]
    columns += [("perplexity", "right"), ("attention error", "right"), ("seconds", "right")]
    rows = [
        [
            r.recipe,
            f"{r.bpe:.3f}",
            f"{shown_kl(r.kl):.5f}",
            f"{r.kl_se:.5f}",
            f"{r.top1:.1%}",
            f"{r.ppl:.3f}",
            f"{r.attn_rel_mse:.5f}",
            f"{r.seconds:.0f}",
        ]
        for r in results
    ]
    print_table(
        "", columns, rows, f"{segments.tokens} tokens; bits with windows and partly filled pages at this context"
    )
    length = segments.ids.shape[1] - 1  # tokens that the last scored one reads, itself included
    for recipe in chosen:
        if not packed_tokens(recipe, length):
            say(f"{recipe.name}: {nothing_packed(recipe, length)}; its KL is not meaningful, use a longer --context")
    if args.profile:
        print_profile(results)
    return 0


def print_profile(results: Sequence[Result]) -> None:
    """Errors of every layer, three recipes a table, so that it fits a terminal."""
    for some in (results[first : first + 3] for first in range(0, len(results), 3)):
        columns: list[tuple[str, str]] = [("layer", "right")]
        for result in some:
            columns += [(f"{result.recipe} attention", "right"), ("logits", "right")]
        rows = [
            [str(layer), *(text for r in some for text in (f"{r.layers[layer]:.5f}", f"{r.logits[layer]:.4f}"))]
            for layer in range(len(some[0].layers))
        ]
        print_table(
            "",
            columns,
            rows,
            "attention: error of the outputs over their energy; logits: squared error, as attention weighs it",
        )

"""Free-running generation: a model answers questions from a cache, and the answers are scored.

Prompts go through the tokenizer's chat template where it has one. They are prefilled once for all recipes (`PromptStates`), except
for recipes that need the prompt's queries. Questions of similar length share a batch, padded on the left; a batch that does not fit
into memory is halved. Answers are stored as they are generated (`Journal`), so that an interrupted run can be continued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from kvant.chats import templated
from kvant.engines import graphs, lending
from kvant.eval.padding import pad_rows
from kvant.eval.prompt_states import PromptStates, padded
from kvant.eval.tasks import Question, Task
from kvant.files import cache_dir, collect, directory_for, replacing
from kvant.spec import parse_json

Tensor = torch.Tensor
ABANDONED = 30 * 24 * 3600  # seconds after which answers of an interrupted run are removed


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How answers are drawn: greedy with temperature 0, else `samples` answers a question."""

    samples: int = 1
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError(f"samples={self.samples} of a greedy answer are all the same: give a temperature above 0")

    @property
    def options(self) -> dict[str, Any]:
        if self.temperature == 0.0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "repetition_penalty": 1.0,
        }

    def pick(self, logits: Tensor) -> Tensor:
        """The next token of every row of logits [rows, vocabulary]: int64 [rows, 1]."""
        if self.temperature == 0.0:
            return logits.argmax(-1, keepdim=True)
        return torch.multinomial(torch.softmax(logits.float() / self.temperature, -1), 1)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer. `length` is that of its prompt, `tokens` its own, both in tokens."""

    question: str
    sample: int
    text: str
    score: float
    length: int
    tokens: int


class Prompts:
    """Questions as token ids, put through the chat template where the tokenizer has one."""

    def __init__(self, tokenizer: Any, questions: Sequence[Question]) -> None:
        self.tokenizer, self.questions = tokenizer, list(questions)
        self.ids = [encode(tokenizer, question.prompt) for question in questions]

    @property
    def digest(self) -> str:
        """Names what the model reads: a chat template is not part of its weights."""
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()

    def check(self, limit: int | None, name: str) -> None:
        """Refuses questions that are longer, with their answers, than the model's context of `limit` tokens."""
        longest = max(len(ids) + q.max_new_tokens for ids, q in zip(self.ids, self.questions, strict=True))
        if limit is not None and longest > limit:
            raise ValueError(
                f"task {name}: its longest question takes {longest} tokens with its answer, and the model's context is {limit}"
            )


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of what a user says."""
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt}]
        found = templated(tokenizer, message, "a question", add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        found = tokenizer(f"{prompt}\nAnswer:", verbose=False)["input_ids"]
    return list(found)


@torch.inference_mode()
def ask(
    model: Any,
    prompts: Prompts,
    task: Task,
    make_cache: Callable[[], Any] | None,
    *,
    batch: int,
    sampling: Sampling,
    states: PromptStates | None = None,
    graph: bool = False,
    journal: Journal | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Answer]:
    """Answers to all questions, in their order, one sample after another. `make_cache` gives an empty cache for a batch; None
    takes transformers' own full cache. With `states` the prompts' prefill is taken from there; without, every batch is prefilled
    by the model through its cache. `graph` decodes in a CUDA graph where the cache can. `progress` is called with tokens: those
    done, and those of all answers at their longest."""
    tokenizer = prompts.tokenizer
    wanted = [(i, sample) for sample in range(sampling.samples) for i in range(len(prompts.ids))]
    found: dict[tuple[int, int], Answer] = {} if journal is None else journal.read(prompts.questions)
    left = sorted((pair for pair in wanted if pair not in found), key=lambda pair: (-len(prompts.ids[pair[0]]), pair))
    limits = [question.max_new_tokens for question in prompts.questions]
    total = sum(limits[i] for i, _ in wanted)

    def tell(steps: int, batch: Sequence[tuple[int, int]]) -> None:
        """Progress in tokens: answers count with all that they may have, those under way with the steps so far."""
        progress(sum(limits[i] for i, _ in found) + sum(min(steps, limits[i]) for i, _ in batch), total)

    tell(0, ())
    while left:
        some = left[:batch]
        try:
            texts = _generate(
                model,
                tokenizer,
                prompts,
                some,
                make_cache,
                sampling,
                states,
                graph,
                functools.partial(tell, batch=some),
            )
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            batch = max(1, min(batch, len(some)) // 2)
            torch.cuda.empty_cache()
            say(f"out of memory: {batch} questions at a time from here on")
            continue
        for (i, sample), (text, tokens) in zip(some, texts, strict=True):
            question = prompts.questions[i]
            score = task.score(question, text)
            found[i, sample] = Answer(question.id, sample, text, score, len(prompts.ids[i]), tokens)
        left = left[len(some) :]
        if journal is not None:
            journal.write(found)
        tell(0, ())
    return [found[pair] for pair in wanted]


def _generate(
    model: Any,
    tokenizer: Any,
    prompts: Prompts,
    some: Sequence[tuple[int, int]],
    make_cache: Callable[[], Any] | None,
    sampling: Sampling,
    states: PromptStates | None,
    graph: bool,
    tell: Callable[[int], None],
) -> list[tuple[str, int]]:
    """Answers of a batch, and their tokens. `tell` is called with the number of steps after each."""
    rows = [prompts.ids[i] for i, _ in some]
    width = max(map(len, rows))
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end if end is not None else 0
    ids, real = pad_rows(rows, pad, "left", model.device)
    mask = real.long()
    new = max(prompts.questions[i].max_new_tokens for i, _ in some)
    torch.manual_seed(_seed(sampling.seed, some))
    # a full cache that is filled has the same kind of layer throughout; one that the model fills has the model's
    full = functools.partial(DynamicCache, config=None if states is not None else model.config)
    cache = (make_cache or full)()
    if states is not None:
        first = _fill(cache, ids, mask, [i for i, _ in some], states, sampling)
        ids, mask, new = torch.cat((ids, first), 1), torch.nn.functional.pad(mask, (0, 1), value=1), new - 1
    steps = StoppingCriteriaList([_Steps(tell)])
    options = {"max_new_tokens": new, "pad_token_id": pad, "stopping_criteria": steps, **sampling.options}
    if not new:
        out = ids
    elif graph and make_cache is not None and graphs.refuse(model, cache) is None:
        out = cache.generate(model, ids, mask, graph=True, **options)
    elif states is not None and make_cache is not None:
        out = cache.generate(model, ids, mask, **options)
    else:
        with contextlib.nullcontext() if make_cache is not None else _unrepeated(model):
            out = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    ends = _ends(model, tokenizer)
    answers = []
    for (i, _), row in zip(some, out[:, width:].tolist(), strict=True):
        row = row[: prompts.questions[i].max_new_tokens]
        stop = next((at for at, token in enumerate(row) if token in ends), None)
        said = row if stop is None else row[:stop]
        answers.append((tokenizer.decode(said, skip_special_tokens=True), len(said) + (stop is not None)))
    return answers


@contextlib.contextmanager
def _unrepeated(model: Any) -> Iterator[None]:
    """On a CPU, lets a model whose attention is SDPA attend by the attention function "kvant": for a padded batch it gives the same
    numbers without repeating keys and values for every query head."""
    if model.device.type != "cpu" or model.config.get_text_config(decoder=True)._attn_implementation != "sdpa":
        yield
        return
    give_back = lending.borrow(model.config)
    try:
        yield
    finally:
        give_back()


class _Steps(StoppingCriteria):
    """Stops nothing: tells how many steps a generation has done."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.tell, self.count = tell, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.count += 1
        self.tell(self.count)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _fill(
    cache: Any, ids: Tensor, mask: Tensor, prompts: Sequence[int], states: PromptStates, sampling: Sampling
) -> Tensor:
    """Stores the prompts in a cache and returns the first token of every answer: int64 [rows, 1]."""
    found = states.of(prompts)
    batch = [found[i] for i in prompts]
    if isinstance(cache, DynamicCache):
        for layer, (key, value) in enumerate(padded(batch)):
            cache.update(key, value, layer)
    else:
        cache.fill(ids, mask, padded(batch))
    return sampling.pick(torch.stack([state.logits for state in batch]))


def _seed(seed: int, some: Sequence[tuple[int, int]]) -> int:
    """A seed for a batch: the same questions and samples draw the same numbers, whatever was asked before."""
    return int.from_bytes(hashlib.sha256(repr((seed, list(some))).encode()).digest()[:7], "little")


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = tokenizer.eos_token_id if found is None else found
    return set(found) if isinstance(found, list) else set() if found is None else {found}


class Journal:
    """Answers of a run that is not complete, in kvant's cache directory under a digest of what decides them."""

    def __init__(self, decides: Any) -> None:
        named = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
        self.path = cache_dir() / "answers" / f"{named}.json"

    def read(self, questions: Sequence[Question]) -> dict[tuple[int, int], Answer]:
        """The stored answers; none where there is no file, or one that cannot be read."""
        try:
            rows = parse_json(self.path.read_text(encoding="utf-8"))["answers"]
            place = {question.id: i for i, question in enumerate(questions)}
            answers = [Answer(**row) for row in rows]
            return {(place[answer.question], answer.sample): answer for answer in answers}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def write(self, found: dict[tuple[int, int], Answer]) -> None:
        """Stores the answers so far. Where the directory cannot be written to, the run only cannot be continued later."""
        with contextlib.suppress(OSError), directory_for(self.path.parent), replacing(self.path) as temporary:
            temporary.write_text(json.dumps({"answers": [dataclasses.asdict(a) for a in found.values()]}))

    def remove(self) -> None:
        """Removes the stored answers of this run, which is complete, and those of runs that were abandoned."""
        collect(self.path.parent)
        with contextlib.suppress(OSError):  # a directory that cannot be written to
            self.path.unlink(missing_ok=True)
            for entry in list(os.scandir(self.path.parent)):
                if entry.name.endswith(".json") and time.time() - entry.stat().st_mtime > ABANDONED:
                    Path(entry.path).unlink(missing_ok=True)

"""The tables of docs/results.md and docs/ablations.md: which rows each has, and how a row is printed.

A row is named by its recipe, with what was changed around it:

    oscar@2048     calibrated for positions below 2,048
    oscar#2048     calibrated on 2,048 tokens
    oscar%chat     calibrated on another kind of text
    oscar+20000    read at positions moved by 20,000
    kitty~random   boosted channels drawn at random: Kitty's control
    tuned-2.5      what `kvant tune --bits 2.5` makes
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from kvant import recipes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / "results.md", ROOT / "docs" / "ablations.md"]
SMOLLM2, QWEN = "smollm2-135m", "qwen2.5-coder-1.5b"
HEAD_DIMS = {SMOLLM2: 64, QWEN: 128}
TASK_RECIPES = [
    *(
        "full",
        "int8",
        "kvant-4",
        "kvant-3",
        "kvant-2",
        "kvant-4-fast",
        "oscar",
        "kitty-pro",
        "kivi-k2v2-sink",
        "saw-int4",
    )
]
# Windows of values in the model's dtype. kvant-2 had them at first.
MODEL_WINDOWS = "v.window_dtype=model"
OURS = [  # windows, widths and budgets
    *(f"kvant-2:recent={recent},{MODEL_WINDOWS}" for recent in (64, 128, 160, 256)),
    *(f"kvant-2:{MODEL_WINDOWS}", f"kvant-2:{MODEL_WINDOWS}%builtin", f"kvant-2:k.bits=4/4/2,v.bits=2,{MODEL_WINDOWS}"),
    *("kvant-3:k.bits=4/4/0", "kvant-3:k.bits=3", "kvant-3%builtin", "kvant-4:recent=64", "kvant-4%builtin"),
    *("tuned-2.3", "tuned-2.5", "tuned-3", "tuned-4"),
]
NEEDLES = [4096, 8192, 16384, 28000]
LONG = ["saw-int4", f"kvant-2:search=9,recent=64,{MODEL_WINDOWS}", "oscar:sink=4,recent=64"]

SEARCHED = [  # kvant-2 with a searched scale, and what was changed of it; all with the windows that it had when they were measured
    *("", "rope=post", "k.mean=false", "share=0", "k.bits=2,k.bands=one", "k.bits=3/2/1", "k.hadamard=false"),
    *("k.unbiased=false", "levels=lloyd", "sink=0"),
]
KVANT_PARTS = [
    *("kvant-2", f"kvant-2:{MODEL_WINDOWS}", f"kvant-2:recent=64,{MODEL_WINDOWS}"),
    *(f"kvant-2:rope_block={block},recent=64,{MODEL_WINDOWS}" for block in (512, 1024)),
    *(",".join(filter(None, ("kvant-2:search=9", change, "recent=64", MODEL_WINDOWS))) for change in SEARCHED),
    *(f"kvant-2:search=9,recent={recent},{MODEL_WINDOWS}" for recent in (16, 256)),
    *("oscar:sink=4,recent=64", "oscar:sink=4,recent=256"),
    *("kvant-3", "kvant-3:v.window_dtype=fp8", "kvant-4", "kvant-4:v.window_dtype=fp8"),
    *("kvant-4-fast", "kvant-4-fast:search=1", "kvant-4-fast:sink=4"),
    *("saw-int4-kv", "saw-int4-kv:zero=float,search=5", "saw-int4-kv:sink=4"),
]
OSCAR_FACTORS = [  # table 4
    *("oscar", "oscar:k.target=keys,v.target=values", "oscar:bitrev=false", "oscar:hadamard=none"),
    *("oscar:target=none", "oscar:target=none,hadamard=none", "oscar:per_head=true"),
]
OSCAR_WINDOWS = ["oscar:sink=0,recent=0", "oscar:sink=32,recent=128", "oscar", "oscar:sink=128,recent=512"]  # table 5
OSCAR_CLIPS = [  # table 6
    "oscar",
    *(f"oscar:k.clip={k},v.clip={v}" for k in (0.88, 0.92, 0.96, 1) for v in (0.88, 0.92, 0.96, 1)),
]
OSCAR_CALIBRATION = ["oscar#2048", "oscar", "oscar#16384", "oscar#32768", "oscar%chat", "oscar%code"]  # table 7
OSCAR_GROUPS = [
    *("oscar", "oscar:bitrev=false", "oscar:group=64", "oscar:group=64,bitrev=false"),
    *("oscar:group=32", "oscar:group=32,bitrev=false"),
]
SAW_ORDERS = [
    "int4",
    *(f"saw-int4{both}:order={order}" for order in (16, 32, 64) for both in ("", "-kv")),
    *("saw-int4", "saw-int4-kv"),  # order 128
    *("saw-int4:zero=float", "saw-int4-hessian", "saw-int4-hessian-kv"),
]
SAW_CENTROIDS = [f"saw-int4-kmeans{rotated}:centroids={count}" for count in (1, 16) for rotated in ("", "-rot")]
SAW_CENTROIDS += ["saw-int4-kmeans", "saw-int4-kmeans-rot"]  # 256
VECINFER_TRANSFORMS = [  # table 4
    *(f"vecinfer-4{changes}" for changes in (":power=0,order=1", ":order=1", ":power=0", "")),
    *("million-4", "vecinfer-1.5", "million-1.5"),
]
VECINFER_SHORT = [  # at 1.5 bits, calibrated on 8,192 tokens
    *(f"vecinfer-1.5{changes}#8192" for changes in (":power=0", ":order=1", "", "@2048")),
    *("million-1.5#8192", "million-1.5@2048#8192"),
]
SQUAT = [
    "kivi-k2v2:group=32,k.flush=32,v.recent=32",
    *(f"squat:rank=5,weight={weight}" for weight in (0.0001, 0.001, 0.01, 0.1)),
    *(f"squat:rank={rank}" for rank in (10, 20, 40, 60)),
    "squat-pre",
]
KITTY = [
    "kivi-k2v2-sink:k.group=128,k.flush=128",
    *(f"kitty:boost={share}{chosen}" for share in (0.125, 0.25, 0.5, 0.75) for chosen in ("", "~random")),
    "kitty:boost=1",
]
KITTY_CONTROL = [f"kitty:boost={share}{how}" for share in (0.25, 0.5) for how in ("", "~random")]
FRONT = [  # before and after, and the best of the others
    *(f"kvant-2:recent={recent},{MODEL_WINDOWS}" for recent in (64, 128, 160, 256)),
    *("kvant-2", f"kvant-2:{MODEL_WINDOWS}", f"kvant-2:{MODEL_WINDOWS}%builtin"),
    *("tuned-2.3", "tuned-2.5", "tuned-3", "tuned-4"),
    *("kvant-3:k.bits=4/4/0", "kvant-3:k.bits=3", "kvant-3"),
    *("kvant-4-fast", "kvant-4:recent=64", "kvant-4", "kvant-4%builtin"),
    *("kitty-pro", "kivi-k2v2-sink", "million-3", "kivi-k4v2-sink", "million-4", "vecinfer-4:power=0"),
    *("saw-int4-kmeans-rot", "kivi-k4v4", "int8"),
]

ABLATIONS: dict[str, dict[str, list[str]]] = {
    SMOLLM2: {
        "kvant's parts": KVANT_PARTS,
        "Zero points": ["int4", "int4:zero=float", "saw-int4", "saw-int4:zero=float"],
        "OSCAR's parts": [
            *("oscar", "oscar:k.clip=0.96,v.clip=0.92", "oscar:clip=1", "oscar:target=none", "oscar:hadamard=none"),
            *("oscar:per_head=true", "oscar:sink=0,recent=0"),
        ],
        "Positions": [
            *("oscar", "oscar+20000", "oscar@2048", "oscar@2048+20000", "int4:zero=float", "int4:zero=float+20000"),
            *(
                f"kvant-2:{MODEL_WINDOWS}",
                f"kvant-2:{MODEL_WINDOWS}+20000",
                "kvant-4-fast@32768",
                "kvant-4-fast@32768+20000",
            ),
        ],
        "SQuat and KIVI": ["kivi-k2v2:group=32,k.flush=32,v.recent=32", "squat", "squat-pre"],
        "VQ and the first token": [
            *("vecinfer-4", "million-4", "vecinfer-2", "million-2"),
            *("vecinfer-4:sink=0", "million-4:sink=0", "vecinfer-2:sink=0", "million-2:sink=0"),
        ],
        "SAW-INT4's centroids": [
            *(
                "saw-int4-kmeans:centroids=16,zero=float",
                "saw-int4-kmeans:zero=float",
                "saw-int4-kmeans-rot:zero=float",
            ),
            *("saw-int4-hessian:zero=float", "saw-int4-hessian-kv:zero=float"),
        ],
        "SAW-INT4 table 9": SAW_CENTROIDS,
        "Kitty's control": KITTY_CONTROL,
        "VecInfer and MILLION": VECINFER_SHORT,
    },
    QWEN: {
        "OSCAR table 4": OSCAR_FACTORS,
        "OSCAR table 5": OSCAR_WINDOWS,
        "OSCAR table 6": OSCAR_CLIPS,
        "OSCAR table 7": OSCAR_CALIBRATION,
        "OSCAR groups": OSCAR_GROUPS,
        "SAW-INT4 table 8": SAW_ORDERS,
        "SAW-INT4 table 9": ["int4", "saw-int4", "saw-int4-kmeans", "saw-int4-kmeans-rot"],
        "SQuat table 3": SQUAT,
        "Kitty figure 4": KITTY,
        "VecInfer table 4": VECINFER_TRANSFORMS,
    },
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """A row's name, taken apart."""

    recipe: str
    random: bool = False
    positions: int | None = None
    tokens: int | None = None
    text: str | None = None
    offset: int = 0

    @property
    def tuned(self) -> float | None:
        """The budget of a tuned recipe."""
        name, _, bits = self.recipe.partition("-")
        return float(bits) if name == "tuned" else None

    @staticmethod
    def parse(name: str) -> Spec:
        plain, *parts = re.split(r"([@#%+~])", name)
        found = dict(zip(parts[::2], parts[1::2], strict=True))
        return Spec(
            plain,
            random=found.get("~") == "random",
            positions=int(found["@"]) if "@" in found else None,
            tokens=int(found["#"]) if "#" in found else None,
            text=found.get("%"),
            offset=int(found.get("+", 0)),
        )


def ablation_rows(model: str) -> list[str]:
    return list(dict.fromkeys(name for names in ABLATIONS[model].values() for name in names))


def quality_table(rows: dict[str, dict[str, Any]], names: list[str], dim: int, whole: bool = False) -> str:
    """Rows of one text. The whole table has bits at both head dims and perplexity too."""
    headings = ["recipe", f"bits ({dim})", "at 32k", "KL", "± se", "top-1", "attention error"]
    if whole:
        headings = ["recipe", "bits (64)", "at 32k", "bits (128)", "at 32k", "KL", "± se", "top-1", "PPL", "attention"]
    body = []
    for name in names:
        if name not in rows:
            body.append([f"`{name}`", "not measured", *[""] * (len(headings) - 2)])
            continue
        row = rows[name]
        cells = [f"{bits:.3f}" for at in (("64", "128") if whole else (str(dim),)) for bits in row["bits"][at]]
        cells += [f"{max(0.0, row['kl']):.4f}", f"{row['kl_se']:.4f}", f"{row['top1']:.1%}"]
        cells += [f"{row['ppl']:.2f}"] if whole else []
        shown = label(name.replace(",recent=64,v.", ",v."))  # the documents say so above the table
        body.append([shown, *cells, f"{row['attn_rel_mse']:.4f}"])
    return markdown(headings, body)


def texts_table(data: dict[str, Any], dim: int, chosen: list[str] | None = None) -> str:
    """Every recipe on every text, by KL on prose; or chosen ones, by bits."""
    kinds = list(data["texts"])
    rows = {kind: {row["recipe"]: row for row in data["texts"][kind]["results"]} for kind in kinds}
    prose = rows[kinds[0]]
    names = [name for name in chosen or recipes.names() if name in prose]
    names.sort(key=lambda name: prose[name]["bits"][str(dim)][1] if chosen else prose[name]["kl"])
    body = []
    for name in names:
        cells = [f"{bits:.3f}" for bits in rows[kinds[0]][name]["bits"][str(dim)]]
        for kind in kinds:
            row = rows[kind].get(name)
            cells += ["", ""] if row is None else [f"{max(0.0, row['kl']):.4f}", f"{row['top1']:.1%}"]
        body.append([label(name), *cells])
    body += [
        [f"`{name}`", "not measured", *[""] * (1 + 2 * len(kinds))]
        for name in chosen or recipes.names()
        if name not in names
    ]
    headings = ["recipe", "bits", "at 32k"]
    for kind in kinds:
        headings += [f"KL {kind}", "top-1"]
    return markdown(headings, body)


def tasks_table(scores: list[dict[str, Any]]) -> str:
    """One task: score, difference from the full cache with its paired 95 % interval, wins and losses."""
    body = []
    for i, row in enumerate(scores):
        low, high = (100 * (row["difference"] + side * (row["half"] or 0.0)) for side in (-1, 1))
        compared = [f"{100 * row['difference']:+.1f}", f"{low:+.1f} to {high:+.1f}", f"{row['wins']} / {row['losses']}"]
        cells = [
            f"{row['bits']:.2f}",
            f"{100 * row['score']:.1f}",
            *(compared if i else [""] * 3),
            f"{row['tokens']:,}",
        ]
        body.append([_run(row), *cells])
    headings = ["cache", "bits at this length", "score, %", "difference", "95 % interval", "won / lost", "tokens"]
    return markdown(headings, body)


def needles_table(tasks: dict[str, list[dict[str, Any]]], kind: str) -> str:
    """Scores of one kind of needle by length, and the mean difference from the full cache."""
    found = {n: tasks[label] for n in NEEDLES if (label := needle(kind, n)) in tasks}
    names = list(dict.fromkeys(row["recipe"] for scores in found.values() for row in scores))
    body = []
    for name in names:
        rows = {n: next((row for row in scores if row["recipe"] == name), None) for n, scores in found.items()}
        cells = ["" if row is None else f"{100 * row['score']:.1f}" for row in rows.values()]
        measured = [row for row in rows.values() if row is not None]
        bits = f"{measured[-1]['bits']:.2f}" if measured else ""
        difference = 100 * sum(row["difference"] for row in measured) / max(1, len(measured))
        body.append([_run(measured[0]), bits, *cells, f"{difference:+.1f}"])
    return markdown(["cache", "bits at the longest", *(f"{n:,}" for n in found), "mean difference"], body)


def needle(kind: str, length: int) -> str:
    """A task's label."""
    return kind if length == 4096 else f"{kind}:length={length}"  # 4,096 is the default


def _run(row: dict[str, Any]) -> str:
    return row["recipe"] if row["recipe"].startswith("full cache") else label(row["recipe"])


def label(name: str) -> str:
    """A row's name in a table; "w16" stands for windows of values in 16 bits."""
    short = re.sub(f"[:,]{MODEL_WINDOWS}", "", name)
    return f"`{name}`" if short == name else f"`{short}` w16"


def markdown(headings: list[str], body: list[list[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def tables_of(model: str, data: dict[str, Any]) -> dict[str, str]:
    """All tables of a model, by the title in their marker."""
    dim = HEAD_DIMS[model]
    rows = {row["recipe"]: row for row in data["texts"]["prose"]["results"]}
    out = {title: quality_table(rows, names, dim) for title, names in ABLATIONS[model].items()}
    if model == SMOLLM2:
        everything = sorted(recipes.names(), key=lambda name: rows[name]["kl"] if name in rows else float("inf"))
        out["all"] = quality_table(rows, everything, dim, whole=True)
        out["long"] = quality_table(
            {row["recipe"]: row for row in data["long"]["texts"]["prose"]["results"]}, LONG, dim
        )
    else:
        out["texts"] = texts_table(data, dim)
        out["front"] = texts_table(data, dim, FRONT)
        tasks = data.get("tasks", {})
        if "gsm8k" in tasks:
            out["gsm8k"] = tasks_table(tasks["gsm8k"])
        for kind in ("needle", "needle-multikey", "needle-multiquery"):
            if any(needle(kind, n) in tasks for n in NEEDLES):
                out[kind] = needles_table(tasks, kind)
    return {f"{model}: {title}": table for title, table in out.items()}


def render(tables: dict[str, str]) -> list[str]:
    """Puts tables between their markers in the documents; returns the titles that have no marker."""
    left = dict(tables)
    for page in PAGES:
        text = page.read_text()
        for title, body in tables.items():
            begin, end = f"<!-- table: {title} -->", "<!-- end -->"
            if begin in text:
                head, rest = text.split(begin, 1)
                text = f"{head}{begin}\n{body}\n{end}{rest.split(end, 1)[1]}"
                left.pop(title, None)
        page.write_text(text)
    return list(left)

"""Examples of every command, shown below its help."""

EXAMPLES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("demo",): ("manyheads demo", "manyheads demo --text novel.txt --out demo-novel --replicates 8"),
    ("study", "list"): ("manyheads study list", "manyheads study list joma", "manyheads study list 'limits/infinite*'"),
    ("study", "show"): ("manyheads study show joma/rebound",),
    ("study", "run"): (
        "manyheads study run attention/costs --width 16 --replicates 2",
        "manyheads study run attention/costs --full --dry-run",
    ),
    ("runs", "list"): ("manyheads runs list", "manyheads runs list other-store --json"),
    ("runs", "clean"): ("manyheads runs clean --unfinished --dry-run",),
    ("report",): ("manyheads report --open", "manyheads report runs/joma --out joma.html"),
    ("cite",): ("manyheads cite joma/rebound", "manyheads cite runs"),
    ("count",): (
        "manyheads count --layers 12 --width 768 --heads 12 --vocabulary 50257",
        "manyheads count config.json --length 4k --training --compare",
        "manyheads count package.module:function --shapes 4x128x64:bfloat16 8:int32",
    ),
    ("probe", "weights"): ("manyheads probe weights run/step*",),
    ("probe", "verify"): ("manyheads probe verify run/step*",),
    ("probe", "health"): (
        "manyheads probe health recording",
        "manyheads probe health recording --strict",
    ),
    ("extract",): (
        "manyheads extract pythia-70m --layer 3 --output layer3.safetensors",
        "manyheads extract package.module:function --dim 16 --budget 10k",
    ),
    ("scale",): (
        "manyheads scale --base 64,4,4 --to 64,12,12 --learning-rate 3e-3",
        "manyheads scale --base 64,4,4 --to model --learning-rate 3e-3 --snippet torch",
    ),
    ("scale", "audit"): ("manyheads scale audit train:build --base 64,4,4 --learning-rate 3e-3 --strict",),
    ("scale", "check"): (
        "manyheads scale check --axis heads --seeds 4",
        "manyheads scale check --axis depth --transfer --out checked",
    ),
}


def example_text(name: tuple[str, ...]) -> str:
    """Return the examples of a command below a heading; nothing where there is none."""
    lines = EXAMPLES.get(name, ())
    return "\n".join(["", "examples:", *(f"  {line}" for line in lines)]) if lines else ""

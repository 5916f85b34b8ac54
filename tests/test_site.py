"""Pages of the site that are generated: the gallery and the API."""

import functools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def extensions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    import api_pages
    import gallery_pages

    yield api_pages, gallery_pages
    for name in ("api_pages", "gallery_pages", "coverage_verdicts", "results_page", "llms_page", "families_page"):
        sys.modules.pop(name, None)


def test_a_study_has_a_card_and_a_page_with_picture_verdicts_and_command(extensions, tmp_path):
    gallery = extensions[1]
    data = ROOT / "docs/gallery/attention-costs.json"
    shutil.copy(data, tmp_path)
    entry = json.loads(data.read_text(encoding="utf-8"))
    page = gallery.study_page(tmp_path, "attention/costs", entry)
    assert (tmp_path / "attention-costs-0.svg").read_text(encoding="utf-8").startswith("<svg")
    assert entry["command"] in page
    assert all(gallery.cell(gallery.escape(verdict["claim"])) in page for verdict in entry["verdicts"])
    assert ":img-top: attention-costs-0.svg" in gallery.card(tmp_path, "attention/costs", entry)
    assert "not-there" in gallery.study_page(tmp_path, "attention/costs", gallery.without_run("not-there"))


@pytest.mark.parametrize("data", sorted((ROOT / "docs/gallery").glob("*.json")), ids=lambda path: path.stem)
def test_every_picture_of_the_gallery_has_a_title_of_its_own_and_named_axes(data):
    panels = json.loads(data.read_text(encoding="utf-8"))["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    drawn = [panel for panel in panels if panel["kind"] != "listing"]
    assert drawn
    assert all(panel["x_label"] and panel["y_label"] for panel in drawn)


def test_the_gallery_counts_the_verdicts_of_the_acceptance_lane(extensions):
    found = extensions[1].accepted()
    assert found
    for rows, command in found.values():
        assert command.startswith("manyheads study run ")
        assert all(len(row) == 3 for row in rows)


def known_claims(study):
    """Return the claims of a study in the runs of the gallery and at its smallest size: they need data."""
    name = study.replace("/", "-")
    gallery = json.loads((ROOT / f"docs/gallery/{name}.json").read_text(encoding="utf-8"))["verdicts"]
    recorded = json.loads((ROOT / f"tests/study/recorded/{study.replace('/', '.')}.json").read_text(encoding="utf-8"))
    return [[verdict["claim"] for verdict in run] for run in (gallery, recorded["verdicts"]["0"])]


def test_every_row_of_the_coverage_page_is_one_claim_of_a_study(extensions):
    import coverage_verdicts

    texts = functools.cache(known_claims)
    rows = [row for section in coverage_verdicts.sections() for row in section["claims"]]
    marks = [(row["study"], row["verdict"]) for row in rows if "study" in row]
    assert len(marks) > 200
    found = {mark: {sum(claim.startswith(mark[1]) for claim in run) for run in texts(mark[0])} for mark in marks}
    unknown = {mark[0] for mark, counts in found.items() if counts not in ({1}, {0, 1})}
    assert not unknown
    filled = coverage_verdicts.page(ROOT / "docs/gallery")
    assert ">refuted" in filled
    assert filled.count("\n|") == len(rows) + 2 * len(coverage_verdicts.sections())
    for path in re.findall(r"`tests/[\w/]+\.py`", filled):
        assert (ROOT / path.strip("`")).exists()


def test_every_page_is_in_the_list_for_language_models(extensions):
    import llms_page

    lines = llms_page.listing(ROOT / "docs").splitlines()
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tours").glob("*.md")]
    included = {"changelog.md", "contributing.md", "notebook.md"}  # files of the repository
    assert len(lines) == len([page for page in pages if page.name not in included])
    assert sum(": " in line for line in lines) > 0.8 * len(lines)


def test_the_page_for_assistants_names_what_exists():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 60
    for path in re.findall(r"`((?:src|tests)/[\w./]+)`", text) + re.findall(r"\]\(([\w./]+)\)", text):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE)) <= targets
    for module in re.findall(r"^python -m ([\w.]+)", text, re.MULTILINE):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


def test_every_public_name_has_a_page(extensions, tmp_path):
    api = extensions[0]
    api.write_pages(tmp_path)
    names = (ROOT / "tests/public_names.txt").read_text(encoding="utf-8").split()
    assert {path.stem for path in tmp_path.glob("*.rst")} >= set(names)


def test_bars_of_absolute_values_are_escaped_outside_of_mathematics(extensions):
    lines = ["|x| grows", ".. math:: |x|", "   |y|", "as `|z|` and |n| do"]
    extensions[0].escape_bars(None, None, None, None, None, lines)
    assert lines == [r"\|x\| grows", ".. math:: |x|", "   |y|", r"as `|z|` and \|n\| do"]


def test_every_result_of_the_acceptance_lane_is_on_its_page(extensions):
    import results_page

    unmet = {f"{row['wing']}/{row['figure']}" for row in results_page.results() if not row["met"]}
    assert set(results_page.reasons()) == unmet

    page = (ROOT / "docs/acceptance.md").read_text(encoding="utf-8").replace(results_page.MARK, results_page.page())
    for row in results_page.results():
        assert page.count(f"| {row['figure']} | {row['claim'].replace('|', '/')} |") == 1
    failed = page.partition("## Not met")[2].partition("##")[0].strip().splitlines()[2:]
    assert len(failed) == sum(not row["met"] for row in results_page.results())


def test_the_page_of_families_holds_every_type_and_the_five_words(extensions):
    import families_page
    from tests.models.public import PUBLIC
    from tests.models.tools import WORDS

    from manyheads.models.families import FAMILIES, UNSUPPORTED

    text = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    filled = families_page.fill(text)
    assert all(f"`{name}`" in filled for name in (*FAMILIES, *UNSUPPORTED))
    assert all(f"| {name} |" in filled for name in PUBLIC)
    rows = [line for line in filled.splitlines() if line.startswith("| `")]
    words = {cell.partition(" (")[0].strip() for line in rows for cell in line.split("|")[2:-1]}
    assert words <= set(WORDS)
    assert {word for word in WORDS if f"*{word}*" in text} == set(WORDS)
    assert not any(mark in filled for mark in ("`families`", "`unsupported`", "`public`"))


def test_figures_of_a_reason_stand_in_its_result(extensions):
    import results_page

    number, unknown = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?"), []
    for row in results_page.results():
        if row["met"]:
            continue
        text = json.dumps([row["measured"], row["required"]])
        known = [float(each) for each in number.findall(text.replace(" .", " 0."))]
        ends = [tuple(map(float, pair)) for pair in re.findall(r"\[([-+.\d]+), ([-+.\d]+)\]", text)]
        known += [(high - low) / 2 for low, high in ends]
        for figure in number.findall(results_page.reasons()[f"{row['wing']}/{row['figure']}"]):
            rounding = 0.6 * 10.0 ** -len(figure.partition(".")[2])
            unknown += [(row["figure"], figure)] * all(abs(abs(each) - abs(float(figure))) > rounding for each in known)
    assert not unknown


def test_the_caption_of_the_front_picture_follows_from_its_data():
    data = json.loads((ROOT / "docs/gallery/limits-learning-rate-transfer.json").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    curves = data["panels"][0]["curves"][0][0]
    sizes = [int(curve["label"].removeprefix("N = ")) for curve in curves]
    replicates = int(data["command"].split("--replicates ")[1].split()[0])
    assert f"N = {sizes[0]}, {sizes[1]} (tuned) and {sizes[2]}, {replicates} seeds" in text
    best = {curve["label"]: curve["y"] for curve in data["panels"][1]["curves"] if curve["role"] == "trained"}
    assert best["standard"] == sorted(best["standard"], reverse=True)
    outcomes = {verdict["claim"].partition(" parametrization")[0]: verdict["outcome"] for verdict in data["verdicts"]}
    assert outcomes["limits (1, 1)"] == outcomes["standard"] == "holds"

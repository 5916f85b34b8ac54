"""Words of the command line: numbers, flags, examples, completion, colours, and the list of studies."""

import importlib
import json
import shlex
from decimal import Decimal

import pytest

from manyheads.cli import COMMANDS, main
from manyheads.cli.flags import flags_of
from manyheads.cli.help.completion import candidates
from manyheads.cli.help.descriptions import hash_of_file
from manyheads.cli.parsing import _Screen, parse_command, whole_number
from manyheads.cli.study import Options
from manyheads.study.registry import STUDIES


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("1e6", 10**6), ("1.5e6", 1_500_000), ("1_000", 1000), ("-3", -3)],
)
def test_whole_numbers(text, value):
    assert whole_number(text) == value


@pytest.mark.parametrize(
    "text", ["1.5", "1e-3", "x", "", "M", "nan", "inf", "1e999999999", "0x10", "1MM", "4k", "1M", "2Gi"]
)
def test_what_is_no_whole_number(text):
    with pytest.raises(ValueError, match="invalid literal"):
        whole_number(text)


def test_large_integers_keep_every_digit():
    assert whole_number(str(10**30 + 1)) == 10**30 + 1
    assert whole_number("1e17") == int(Decimal("1e17"))


def test_an_error_of_a_users_function_is_shown_behind_its_type(tmp_path, monkeypatch, capsys):
    (tmp_path / "failing_layers.py").write_text("def absent(): raise KeyError('x')\ndef silent(): raise KeyError\n")
    monkeypatch.chdir(tmp_path)
    for name, line in (("absent", "KeyError: 'x'"), ("silent", "KeyError")):
        assert main(["count", f"failing_layers:{name}"]) == 3
        assert capsys.readouterr().err.splitlines()[-1] == f"manyheads: {line}"


def test_numbers_reach_the_commands():
    flags = ["--layers", "2", "--width", "1_000", "--heads", "4", "--length", "1e3"]
    module, _, name = COMMANDS["count",].place.partition(":")
    count = parse_command(getattr(importlib.import_module(module), name), flags, "manyheads count")
    assert (count.width, count.length) == (1000, 1000)


@pytest.mark.parametrize(
    "words",
    [
        ("count", "--layers", "4k"),
        ("count", "--batch", "2Mi"),
        ("extract", "module:f", "--budget", "1.5M"),
        ("scale", "--base", "64,4,4", "--learning-rate", "3k"),
        ("study", "run", "attention/costs", "--width", "4K"),
        ("study", "run", "attention/costs", "--lengths", "64", "1k"),
    ],
    ids=" ".join,
)
def test_suffixes_are_refused_by_one_rule_that_help_states(words, capsys):
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    assert "a suffix is refused" in said
    assert "1000 or of 1024" in said
    plain = [word for word in words if not word.startswith("-") and not word[0].isdigit()]
    with pytest.raises(SystemExit):
        raise SystemExit(main([*plain[: 3 if "study" in words else 1], "--help"]))
    assert "4k may mean 4000 or 4096" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_every_command_has_examples_that_parse(name):
    module, _, attribute = COMMANDS[name].place.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert COMMANDS[name].examples
    for line in COMMANDS[name].examples:
        program, *words = shlex.split(line)
        assert (program, tuple(words[: len(name)])) == ("manyheads", name)
        assert len(line) <= 78
        rest = words[len(name) :]
        if name == ("study", "run"):
            known = {flag.name for flag in flags_of(Options)} | {"--width"}
            assert {word for word in rest[1:] if word.startswith("--")} <= known
        else:
            command.parse(rest, line) if hasattr(command, "parse") else parse_command(command, rest, line)


def test_completion_offers_commands_studies_and_flags():
    assert candidates(["st"], COMMANDS) == ["study"]
    assert candidates(["study", "r"], COMMANDS) == ["run"]
    assert candidates(["study", "show", "joma/re"], COMMANDS) == [
        *("joma/real-text", "joma/real-text-variants", "joma/rebound")
    ]
    assert candidates(["runs", "clean", "--d"], COMMANDS) == ["--dry-run"]
    assert "--workers" in candidates(["study", "run", "attention/costs", "--w"], COMMANDS)
    assert "--width" in candidates(["study", "run", "attention/costs", "--w"], COMMANDS)
    assert candidates(["nothing", ""], COMMANDS) == []


def test_scripts_for_shells(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert main(["--completion", shell]) == 0
        assert "manyheads --complete" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_list_of_studies_is_sorted_and_wrapped(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["study", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert [line.split()[0] for line in lines if line[0] != " "] == sorted(STUDIES)


@pytest.mark.parametrize(
    ("patterns", "some"),
    [(["joma"], "joma/rebound"), (["limits/infinite*"], "limits/infinite-depth"), (["Entropy"], "joma/rebound")],
)
def test_the_list_of_studies_takes_patterns(capsys, patterns, some):
    assert main(["study", "list", *patterns]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert some in names
    assert len(names) < len(STUDIES)


def test_a_study_is_shown_without_its_import_while_its_file_is_the_same(capsys, monkeypatch, tmp_path):
    name, kept = "attention/costs", tmp_path / "kept.json"
    monkeypatch.setattr("manyheads.cli.help.descriptions.DESCRIPTIONS", kept)
    for file, shown in ((hash_of_file(name), "as kept\n"), ("another", "\n      Heads of the attention block.\n")):
        kept.write_text(json.dumps({name: {"file": file, "text": "as kept", "flags": [], "claims": []}}))
        assert main(["study", "show", name]) == 0
        assert shown in capsys.readouterr().out


def test_a_study_is_shown_with_its_claims(capsys, monkeypatch, tmp_path):
    name, kept = "attention/costs", tmp_path / "kept.json"
    monkeypatch.setattr("manyheads.cli.help.descriptions.DESCRIPTIONS", kept)
    about = {"file": hash_of_file(name), "text": "as kept", "flags": [], "claims": ["a law holds", "another one"]}
    kept.write_text(json.dumps({name: about}))
    assert main(["study", "show", name]) == 0
    assert capsys.readouterr().out.endswith("\n\n  * a law holds\n  * another one\n")


def test_no_color_is_respected(monkeypatch):
    screen = _Screen()
    monkeypatch.setattr(screen.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert screen.isatty()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not screen.isatty()


WORDS = {
    ("cite",): "neither a folder with runs nor a study",
    ("probe", "health"): "RECORDING '' names no file or folder",
    ("probe", "weights"): "'' names no file or folder",
    ("curves", "judge", "run.csv"): "'' names no file or folder",
    ("extract", "--layer", "0"): "ORACLE '': expected package.module:function",
    ("count", "--layers", "2", "--width", "8", "--heads", "2"): "TARGET '': expected a config.json",
    ("study", "list"): "no study matches ''; expected a wing",
    ("study", "list", "joma"): "no study matches ''; expected a wing",
    ("study", "show"): "no study is called ''",
    ("report",): "'' names no file or folder",
    ("report", "--out"): "--out '' names no file or folder",
    ("runs", "export"): "RUN '' names no file or folder",
    ("scale", "audit"): "TARGET '': expected package.module:function",
    ("scale", "preflight"): "TARGET '': expected package.module:function",
}


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_an_empty_word_is_not_the_working_folder(words, capsys):
    extra = ["--base", "64,4,4"] if words[0] == "scale" else ["out.nc"] if "export" in words else []
    assert main([*words, "", *extra]) == 2
    said = capsys.readouterr()
    assert WORDS[words] in said.err
    assert said.err.count("\n") == 1
    assert not said.out

"""Shell completion: a script for the shell, and the words that may follow those typed."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from manyheads.cli.flags import flags_of
from manyheads.errors import UsageError

SCRIPTS = {
    "bash": """_manyheads() {
    local words=("${COMP_WORDS[@]:1:COMP_CWORD}") found
    found="$(manyheads --complete "${words[@]}" 2>/dev/null)"
    COMPREPLY=($(compgen -W "$found" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _manyheads manyheads""",
    "fish": "complete -c manyheads -a '(manyheads --complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'",
}
SCRIPTS["zsh"] = f"autoload -U +X bashcompinit && bashcompinit\n{SCRIPTS['bash']}"


def completion_script(shell: str) -> str:
    """Return what makes a shell complete `manyheads`; UsageError for another shell."""
    if shell not in SCRIPTS:
        raise UsageError(f"--completion {shell!r}: choose one of {', '.join(sorted(SCRIPTS))}")
    return SCRIPTS[shell]


def candidates(words: Sequence[str], commands: Mapping[tuple[str, ...], Any]) -> list[str]:
    """Return the words that may stand at the place of the last one, the ones before it given."""
    before = tuple(words[:-1])
    typed = words[-1] if words else ""
    name = next((before[:count] for count in (2, 1) if before[:count] in commands), ())
    inner = [each[len(before)] for each in commands if each[: len(before)] == before and len(each) > len(before)]
    found = [] if typed.startswith("-") else list(dict.fromkeys(inner))
    if name in (("study", "run"), ("study", "show"), ("study", "list")) and len(before) == 2 and typed[:1] != "-":
        from manyheads.study.registry import STUDIES

        found += STUDIES
    elif name:
        found += _flags(name, before[len(name) :], commands[name].place)
    return sorted(each for each in found if each.startswith(typed))


def _flags(name: tuple[str, ...], given: Sequence[str], place: str) -> list[str]:
    """Return the flags of a command; for a run also those of its study."""
    module, _, attribute = place.partition(":")
    found = flags_of(getattr(importlib.import_module(module), attribute)) if name != ("study", "run") else []
    if name == ("study", "run"):
        from manyheads.cli.help.descriptions import kept_description
        from manyheads.cli.study import Options
        from manyheads.study.registry import load

        kept = kept_description(given[0]) if given else None
        found = flags_of(Options) + (kept.flags if kept else flags_of(load(given[0])) if given else [])
    return ["--help", *(flag.name for flag in found)]

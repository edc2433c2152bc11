"""The command line: `mxep <command> ...`. A command's module is imported when the command runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import mxep

COMMANDS: dict[str, tuple[str, str]] = {  # name: (module whose `command(argv) -> exit status` runs it, what it does)
    "train": ("mxep.train.rank_launcher", "train a MoE model; with no options a small one, on text that every machine has"),
    "convergence": ("mxep.commands.convergence", "several seeds in MXFP8 and in bf16: do they reach the same loss?"),
    "lora-convergence": ("mxep.commands.lora_convergence", "several seeds of LoRA on a base in MXFP8 and in bf16: the same loss?"),
    "generate": ("mxep.commands.generate", "continue a prompt with the model of a run or of a Hugging Face folder"),
    "convert": ("mxep.train.convert", "write a run's weights as a Hugging Face folder"),
    "bench": ("mxep.bench.command", "check and time the kernels and the pipeline; `report` writes tables in README and docs, and plots"),
    "profile": ("mxep.commands.profile", "time every exchange of the fused MoE layer here and name the fastest modes"),
    "doctor": ("mxep.commands.doctor", "what this machine can do, which path each part takes and why"),
    "explain": ("mxep.commands.explain", "shapes, bytes, FLOPs and memory of a configuration, without running it"),
}


def usage() -> str:
    """The help text."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["usage: mxep COMMAND [OPTIONS]", "", "MXFP8 expert-parallel training of Mixture-of-Experts models.", "", "commands:"]
        + lines
        + ["", "`mxep COMMAND --help` lists a command's options."]
    )


def _from_home(word: str) -> str:
    """--out=~/x with the home folder in place of ~, which the shell leaves as it is behind the =."""
    option, equals, value = word.partition("=")
    return f"{option}={os.path.expanduser(value)}" if equals and option.startswith("--") else word


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status, 2 for an unknown command or a ValueError, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"mxep {mxep.__version__}")
        return 0
    name, *rest = map(_from_home, arguments)
    if name not in COMMANDS:
        print(f"mxep: error: no command {name!r}, want one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(COMMANDS[name][0]).command(rest))
    except ValueError as error:  # wrong options or files: its message says what to do
        print(f"mxep {name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"mxep {name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":  # `python -m mxep.cli` of scripts written for 0.1
    sys.exit(main())

"""`align completion`: what bash completes by its script."""

import shutil
import subprocess

import pytest

from align import cli


@pytest.mark.parametrize("words", [["completion"], ["completion", "cmd"]])
def test_an_unknown_shell_is_one_line(words, command_error):
    assert command_error(cli.main, words).startswith("error: align completion: give one of bash, zsh")


def complete(script, *words):
    """What bash offers for the last word."""
    line = " ".join(words)
    typed = f"COMP_WORDS=({line}); [ -z '{words[-1]}' ] && COMP_WORDS+=(''); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))"
    code = f'source {script}; {typed}; COMP_LINE="{line}"; _shtab_align; printf "%s\\n" "${{COMPREPLY[@]}}"'
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_commands_settings_and_choices(tmp_path, capsys):
    cli.main(["completion", "bash"])
    script = tmp_path / "align.bash"
    script.write_text(capsys.readouterr().out)
    assert {"sft", "reward", "ppo", "eval", "annotate"} <= set(complete(script, "align", ""))
    assert complete(script, "align", "rew") == ["reward"]
    assert complete(script, "align", "ppo", "--kl_es") == ["--kl_estimator"]
    assert complete(script, "align", "ppo", "--kl_estimator", "") == ["k1", "k2", "k3"]
    assert complete(script, "align", "eval", "toxicity", "--scorer_l") == ["--scorer_label"]

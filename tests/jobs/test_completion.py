"""What shells complete, and the list of commands."""

import pytest

from jobs.cli import main
from tests.jobs.commands import rayfl


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("rayfl rep", "plain,report plain,reproduce"),
        ("rayfl methods fedpr", "plain,fedproto plain,fedprox"),
        ("rayfl run schedules-d", "file,schedules-d plain,schedules-digits"),
        # zsh gives a setting as one word, bash as three.
        (
            "rayfl run demo x=1 partition=dirichlet-c",
            "plain,partition=dirichlet-class plain,partition=dirichlet-client",
        ),
        ("rayfl sweep demo partition = dirichlet-c", "plain,dirichlet-class plain,dirichlet-client"),
        ("rayfl run demo rounds=3 no", ""),
    ],
)
def test_a_shell_completes_names(words: str, completed: str, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    monkeypatch.setenv("_RAYFL_COMPLETE", "bash_complete")
    with pytest.raises(SystemExit):
        main.main(prog_name="rayfl")
    assert capsys.readouterr().out.split() == completed.split()


def test_the_list_of_commands_cuts_no_description():
    listed = rayfl("--help").output
    assert "...\n" not in listed.partition("Commands:")[2] and all(name in listed for name in main.commands)
    assert "write the experiment with the best ones." in " ".join(listed.split())

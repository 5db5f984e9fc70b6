"""One thread a test process, as the tests are many, small and run side by side; and commands as a person gives them."""

import signal

import pytest
import torch

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C, and so do its own

collect_ignore = ["flower/quick"]  # for processes of Flower's, not for this one


@pytest.fixture
def evenhand(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder: exit code, stdout, stderr."""
    from evenhand import cli

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(list(arguments))
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return call

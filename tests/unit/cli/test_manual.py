"""The manual page."""

from __future__ import annotations

import shutil
import subprocess

import click
import pytest

from supervisor.cli.main import main
from supervisor.cli.manual import commands, page


class TestManual:
    """All that the commands' help says, in roff."""

    def test_everything_is_in_it(self):
        text = page(main).replace("\\-", "-")
        for path, command in commands(main, ("llmux",)):
            _, found, rest = text.partition(f"\n.SS {' '.join(path)}")
            assert found, path
            section = rest.partition("\n.S")[0]
            for option in command.params:
                if isinstance(option, click.Option):
                    assert f"\n\\fB{', '.join(option.opts)}\\fR" in section

    def test_no_text_is_a_request(self):
        group = click.Group("main", help="Back\\slashes.")
        group.add_command(click.Command("odd", help=".TH is no title\n\n'tis --no request"))
        lines = page(group).splitlines()
        assert r"\&.TH is no title" in lines
        assert r"\&'tis \-\-no request" in lines
        assert any(r"Back\eslashes" in line for line in lines)

    @pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff")
    def test_what_groff_says(self):
        told = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-P-cbou"], input=page(main), capture_output=True, text=True, check=True
        )
        assert told.stderr == ""
        assert "LLMUX_CONFIG" in told.stdout

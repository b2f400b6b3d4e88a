"""On a terminal: colours, widths, progress, `top`, and conversations."""

from __future__ import annotations

import re
import signal
import termios

from supervisor.cli.exit_codes import ExitCode
from tests.support import tiny
from tests.support.daemon import wait_until

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
TAKEN_AWAY = "\x1b[1A\x1b[2K"


class TestLooks:
    """Colours and widths are the terminal's."""

    def test_colours(self, shell):
        with shell.terminal("ps") as terminal:
            assert terminal.end() == ExitCode.DONE
            assert COLOUR.search(terminal.screen)

    def test_no_color(self, shell):
        with shell.terminal("ps", NO_COLOR="1") as terminal:
            assert terminal.end() == ExitCode.DONE
            assert not ESCAPE.search(terminal.screen)

    def test_reasons_are_cut_to_the_width(self, shell):
        shell("load", "broken")
        with shell.terminal("ps", columns=120) as terminal:
            assert terminal.end() == ExitCode.DONE
            lines = ESCAPE.sub("", terminal.screen).splitlines()
            assert max(map(len, lines)) == 120
            assert any(line.endswith("…") for line in lines)
        with shell.terminal("ps", "--wide", columns=120) as terminal:
            assert terminal.end() == ExitCode.DONE
            assert "…" not in terminal.screen


class TestProgress:
    """A load shows its state and time while it lasts, and leaves only its result."""

    def test_load(self, shell, gate):
        with shell.terminal("load", "slow") as terminal:
            terminal.wait_for("s of about")
            gate.touch()
            assert terminal.end() == ExitCode.DONE
            painted = ESCAPE.sub("", terminal.screen)
            assert re.search(r"slow: starting  [━╸╺]+  [\d.]+ s of about [\d.]+ s", painted)
            result = terminal.screen.rpartition(TAKEN_AWAY)[2]
            assert [ESCAPE.sub("", line).split()[0] for line in result.splitlines()] == ["MODEL", "slow"]
        shell("unload", "slow")

    def test_ctrl_c_ends_the_wait_only(self, site, shell, gate):
        with shell.terminal("load", "slow") as terminal:
            terminal.wait_for("starting")
            terminal.type("\x03")
            assert terminal.end() == ExitCode.INTERRUPTED
            assert "llmux unload slow" in terminal.screen
        assert site.model("slow")["state"] == "starting"
        gate.touch()
        wait_until(lambda: site.model("slow")["state"] == "ready", what="the load goes on")
        shell("unload", "slow")

    def test_ended_at_once_it_leaves_a_cursor(self, shell, gate):
        with shell.terminal("load", "slow") as terminal:
            terminal.wait_for("starting")
            terminal.process.terminate()
            assert terminal.end() == -signal.SIGTERM
            assert re.findall(r"\x1b\[\?25[hl]", terminal.screen)[-1] == "\x1b[?25h"
        gate.touch()
        shell("load", "slow")
        shell("unload", "slow")

    def test_none_in_a_pipe(self, shell):
        assert shell("load", "slow").stderr == ""
        shell("unload", "slow")


class TestTop:
    """The other screen, until q or Ctrl-C."""

    def test_q(self, shell):
        with shell.terminal("top", "--interval", "0.2") as terminal:
            terminal.wait_for("q: quit")
            shell("load", "chat")
            terminal.wait_for("ready")
            terminal.type("q")
            assert terminal.end() == ExitCode.DONE
            assert terminal.screen.startswith("\x1b[?1049h")
            assert terminal.screen.endswith("\x1b[?1049l")
        shell("unload", "chat")

    def test_ctrl_c(self, shell):
        with shell.terminal("top") as terminal:
            terminal.wait_for("q: quit")
            terminal.type("\x03")
            assert terminal.end() == ExitCode.DONE
            assert terminal.screen.endswith("\x1b[?1049l")

    def test_it_is_ended(self, shell):
        with shell.terminal("top") as terminal:
            before = terminal.settings
            terminal.wait_for("q: quit")
            wait_until(lambda: termios.tcgetattr(terminal.master) != before, what="keys are read one by one")
            terminal.process.terminate()
            assert terminal.end() == ExitCode.DONE
            assert termios.tcgetattr(terminal.master) == before
            assert terminal.screen.endswith("\x1b[?1049l")

    def test_a_daemon_that_goes_away_and_comes_back(self, alone):
        with alone.terminal("top", "--interval", "0.2") as terminal:
            terminal.wait_for("No daemon answers")
            terminal.wait_for("No daemon answers")
            terminal.type("q")
            assert terminal.end() == ExitCode.DONE

    def test_requests(self, site, shell):
        with shell.terminal("chat", "talker", "Hello") as speaker:
            speaker.wait_for("Hello from")
            shown = shell("top", "--once").stdout
            assert "/v1/chat/completions" in shown
            assert "running" in shown
        wait_until(lambda: not site.model("talker")["in_flight"], what="it hung up")


class TestChat:
    """A conversation."""

    def test_turns_and_commands(self, site, shell):
        with shell.terminal("chat", "quick") as terminal:
            terminal.wait_for("> ")
            terminal.type("Hello\n")
            terminal.wait_for(tiny.ANSWER)
            terminal.wait_for("> ")
            terminal.type("/system Be brief\n")
            terminal.wait_for("is set")
            terminal.type("/reset\n")
            terminal.wait_for("Forgotten")
            terminal.type("/what\n")
            terminal.wait_for("/quit ends it")
            terminal.type("/quit\n")
            assert terminal.end() == ExitCode.DONE

    def test_thoughts_are_dimmed(self, shell):
        with shell.terminal("chat", "thinker", "Hello") as terminal:
            assert terminal.end() == ExitCode.DONE
            thought, answer = terminal.screen.splitlines()
            assert thought.startswith("\x1b[2m")
            assert thought.endswith("\x1b[0m")
            assert (ESCAPE.sub("", thought), answer) == (tiny.THOUGHT, tiny.ANSWER)

    def test_ctrl_c_cuts_the_answer_and_keeps_the_session(self, site, shell):
        with shell.terminal("chat", "talker") as terminal:
            terminal.wait_for("> ")
            terminal.type("Hello\n")
            terminal.wait_for("Hello from a fake worker")
            terminal.type("\x03")
            terminal.wait_for("cut off")
            terminal.wait_for("> ")
            wait_until(lambda: not site.model("talker")["in_flight"], what="the request ended")
            terminal.type("Again\n")
            terminal.wait_for("Hello from a fake worker")
            terminal.type("\x03")
            terminal.wait_for("cut off")
            terminal.wait_for("> ")
            terminal.type("\x04")
            assert terminal.end() == ExitCode.DONE

    def test_an_error_keeps_the_session(self, shell):
        with shell.terminal("chat", "broken") as terminal:
            terminal.wait_for("> ")
            terminal.type("Hello\n")
            terminal.wait_for("llmux: ")
            terminal.wait_for("> ")
            terminal.type("/quit\n")
            assert terminal.end() == ExitCode.DONE

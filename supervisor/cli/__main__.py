"""`python -m supervisor.cli`, the same as `llmux`."""

from supervisor.cli.main import main

main()

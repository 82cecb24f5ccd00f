"""Sweeps use the command line of tests/cli."""

from tests.cli.conftest import cli, start  # noqa: F401 - fixtures

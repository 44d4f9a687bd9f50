"""Settings of the whole suite."""

import pytest
import torch

# Two test processes run side by side. A second thread each would gain nothing on two cores, and
# threads that outnumber the cores wait for one another by spinning.
torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests recorded: figures that are reported, whatever they are."""
    reports = [r for r in terminalreporter.stats.get("passed", []) if r.user_properties]
    if reports:
        terminalreporter.section("recorded")
    for report in reports:
        for name, value in report.user_properties:
            terminalreporter.line(f"{name}: {value} in {report.nodeid.partition('::')[2]}")

"""How many cores may be used, read from files as the kernel writes them."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sampler import cores
from sampler.cores import cpu_quota, num_usable_cores

V1 = "sys/fs/cgroup/cpu"
V2 = "sys/fs/cgroup"


def system(root: Path, groups: str, files: Mapping[str, str]) -> Path:
    """Make the files of a system whose process is in ``groups``."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def v1(group: str, quota: int, period: int = 100_000) -> dict[str, str]:
    directory = f"{V1}{group}"
    return {
        f"{directory}/cpu.cfs_quota_us": str(quota),
        f"{directory}/cpu.cfs_period_us": str(period),
    }


SYSTEMS: dict[str, tuple[str, dict[str, str], float]] = {
    "version 2, in a container": ("0::/", {f"{V2}/cpu.max": "150000 100000"}, 1.5),
    "version 2, without a bound": ("0::/", {f"{V2}/cpu.max": "max 100000"}, float("inf")),
    "version 2, of a service": ("0::/a/b", {f"{V2}/a/b/cpu.max": "50000 20000"}, 2.5),
    "version 2, of the group above": (
        "0::/a/b",
        {f"{V2}/a/cpu.max": "200000 100000", f"{V2}/a/b/cpu.max": "max 100000"},
        2.0,
    ),
    "version 2, the least of several": (
        "0::/a/b",
        {f"{V2}/a/cpu.max": "300000 100000", f"{V2}/a/b/cpu.max": "400000 100000"},
        3.0,
    ),
    "version 2, of the host's root": ("0::/", {}, float("inf")),
    "version 1": ("4:cpu,cpuacct:/a\n3:memory:/a\n0::/", v1("/a", 250_000), 2.5),
    "version 1, without a bound": ("1:cpu:/", v1("", -1), float("inf")),
    "version 1, whose names are the host's": ("1:cpu:/docker/1f", v1("", 100_000, 50_000), 2.0),
    "version 1, of another controller": ("1:cpuset:/a", v1("/a", 100_000), float("inf")),
    "a group outside of what is seen": ("0::/../a", {f"{V2}/cpu.max": "300000 100000"}, 3.0),
}


@pytest.mark.parametrize(("groups", "files", "quota"), SYSTEMS.values(), ids=SYSTEMS.keys())
def test_a_quota_is_found_where_the_kernel_says_it(
    tmp_path: Path, groups: str, files: dict[str, str], quota: float
) -> None:
    assert cpu_quota(system(tmp_path, groups, files)) == quota


def test_where_there_are_no_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == float("inf")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has them")
@pytest.mark.parametrize(
    ("quota", "num_allowed", "num_cores"),
    [(0.5, 8, 1), (1.0, 8, 1), (2.9, 8, 2), (16.0, 8, 8), (float("inf"), 3, 3)],
)
def test_whole_cores_count_and_one_at_least(
    monkeypatch: pytest.MonkeyPatch, quota: float, num_allowed: int, num_cores: int
) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_allowed)))

    assert num_usable_cores() == num_cores


@pytest.mark.skipif(sys.platform == "linux", reason="elsewhere there are no quotas")
def test_elsewhere_all_cores_count() -> None:
    assert num_usable_cores() == os.cpu_count()

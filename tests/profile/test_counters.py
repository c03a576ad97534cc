import stat

import pytest

from wqlab.errors import MissingPartError
from wqlab.profile import counters

LD, COPY = "l1tex__t_{}_pipe_lsu_mem_global_op_ld", "l1tex__t_{}_pipe_lsu_mem_global_op_ldgsts_cache_{}"
NAMES = [
    *(LD.format(what) for what in ("requests", "sectors")),
    *(COPY.format(what, how) for what in ("requests", "sectors") for how in ("access", "bypass")), "dram__bytes_read",
]  # fmt: skip


def table(*launches):
    lines = ["==PROF== Connected to process 1", "noise"]
    lines.append(",".join(f'"{name}"' for name in ["ID", "Kernel Name", *(f"{name}.sum" for name in NAMES)]))
    lines.append(",".join(['""'] * (2 + len(NAMES))))
    lines += [",".join(f'"{x}"' for x in [i, "mixed_decode", *values]) for i, values in enumerate(launches)]
    return "\n".join(lines)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A stand-in for ncu that lists the metrics and copies a table to its log."""

    def make(text, code=0):
        (tmp_path / "table.csv").write_text(text)
        program = tmp_path / "ncu"
        listed = "\\n".join(f"{name}  what it counts" for name in NAMES)
        program.write_text(f"""#!/bin/sh
if [ "$1" = --query-metrics ]; then printf '{listed}\\n'; exit 0; fi
while [ $# -gt 0 ]; do [ "$1" = --log-file ] && cp {tmp_path}/table.csv "$2"; shift; done
exit {code}
""")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(counters, "find_tool", lambda: str(program))

    return make


def test_copies_with_and_without_the_l1_cache_are_added_up(tool):
    tool(table(["10", "40", "1", "2", "4", "8", "1,024"], [0, 0, 0, 3, 0, 12, 7]))
    first, second = counters.global_loads(["true"], "^mixed_decode")
    assert first == {
        "kernel_index": 0, "requests": 10, "sectors": 40, "copy_requests": 3, "copy_sectors": 12, "dram_bytes": 1024,
    }  # fmt: skip
    assert second["copy_sectors"] / second["copy_requests"] == 4


def test_why_it_cannot_count_is_said(tool, monkeypatch):
    tool("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters", code=1)
    with pytest.raises(MissingPartError, match="exit code 1: ERR_NVGPUCTRPERM"):
        counters.global_loads(["true"], "^mixed_decode")
    tool("==WARNING== No kernels were profiled.")
    with pytest.raises(MissingPartError, match="No kernels were profiled"):
        counters.global_loads(["true"], "^mixed_decode")
    tool(table(["n/a"] * 7))
    with pytest.raises(MissingPartError, match="n/a"):
        counters.global_loads(["true"], "^mixed_decode")
    monkeypatch.setattr(counters, "find_tool", lambda: None)
    with pytest.raises(MissingPartError, match="not installed"):
        counters.global_loads(["true"], "^mixed_decode")


def test_shared_loads_take_what_this_version_has(tool, monkeypatch):
    shared = list(counters._SHARED.values())
    monkeypatch.setitem(globals(), "NAMES", shared)
    tool(table(["1,000", "40"], ["7", "0"]))
    first, second = counters.shared_loads(["true"], "^bank_conflicts")
    assert first == {"kernel_index": 0, "wavefronts": 1000, "conflicts": 40}
    assert second["conflicts"] == 0
    more = [*shared, *counters._SHARED_IF_THERE.values()]
    monkeypatch.setitem(globals(), "NAMES", more)
    tool(table(["1", "2", "3", "4", "5"]))
    assert counters.shared_loads(["true"], "x")[0] == {
        "kernel_index": 0, "wavefronts": 1, "conflicts": 2, "sass_wavefronts": 3, "sass_conflicts": 4, "instructions": 5,
    }  # fmt: skip
    tool(table(["1", "2", "n/a", "4", "5"]))  # listed, and not collected after all
    assert counters.shared_loads(["true"], "x")[0] == {"kernel_index": 0, "wavefronts": 1, "conflicts": 2}
    tool("==ERROR== ERR_NVGPUCTRPERM", code=1)
    with pytest.raises(MissingPartError, match="ERR_NVGPUCTRPERM"):
        counters.shared_loads(["true"], "x")

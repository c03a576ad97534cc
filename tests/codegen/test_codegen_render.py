"""Templates become one source: headers written in, and every mistake named."""

import pytest

from wqlab import paths
from wqlab.codegen import render
from wqlab.errors import CompileError, ParameterError, UnknownNameError


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder of templates in the place of ``kernels/``."""
    monkeypatch.setattr(paths, "shipped", lambda name: tmp_path / name)
    folder = tmp_path / "kernels"
    (folder / "parts").mkdir(parents=True)

    def write(files):
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")

    return write


def test_headers_are_written_into_the_source_once(kernels):
    kernels(
        {
            "scale.cu.j2": '#include <cuda_fp16.h>\n  #  include "parts/warp.cuh"\n#include "block.cuh"\n#define TILE {{ tile }}\n',
            "parts/warp.cuh": "#pragma once\n#include <mma.h>\nint warp;\n",
            "block.cuh": '#pragma once\n#include "parts/warp.cuh"\nint block;\n',
        }
    )
    source = render("scale", tile=32)
    assert '.cuh"' not in source
    assert "#pragma once" not in source
    assert source.count("int warp;") == 1
    assert source.index("#include <cuda_fp16.h>") < source.index("#include <mma.h>") < source.index("int block;")
    assert source.endswith("#define TILE 32\n")


def test_a_parameter_chooses_a_header_and_headers_that_include_each_other_end(kernels):
    kernels(
        {
            "parts/k.cu.j2": '#include "{{ which }}.cuh"\n',
            "a.cuh": '#include "b.cuh"\nint a;\n',
            "b.cuh": '#include "a.cuh"\nint b;\n',
        }
    )
    source = render("parts/k", which="a")
    assert [source.count(text) for text in ("int a;", "int b;")] == [1, 1]


def test_included_templates_read_parameters_too(kernels):
    kernels({"outer.cu.j2": "{% include 'inner.j2' %}", "inner.j2": "{{ tile }}"})
    assert render("outer", tile=8) == "8"


def test_an_unknown_template_names_the_known_ones(kernels):
    kernels({"gemm.cu.j2": "", "parts/gemv.cu.j2": ""})
    with pytest.raises(UnknownNameError, match=r"did you mean gemm.*known: gemm, parts/gemv"):
        render("gem")


def test_an_unknown_header_names_the_known_ones(kernels):
    kernels({"k.cu.j2": '#include "wrap.cuh"\n', "warp.cuh": ""})
    with pytest.raises(UnknownNameError, match=r"kernel header 'wrap\.cuh': did you mean warp\.cuh"):
        render("k")


def test_a_missing_parameter_is_named(kernels):
    kernels({"k.cu.j2": "{{ tile }} {{ warps }}"})
    with pytest.raises(ParameterError, match="'warps' is undefined; parameters given: tile"):
        render("k", tile=1)


def test_a_parameter_that_is_never_read_is_named(kernels):
    kernels({"k.cu.j2": "{{ warps }}"})
    with pytest.raises(ParameterError, match="never reads wraps"):
        render("k", warps=1, wraps=2)


def test_a_mistake_in_a_template_is_shown_with_its_line(kernels):
    kernels({"k.cu.j2": "int a;\n{% if tile %}\n"})
    with pytest.raises(CompileError, match=r"kernels/k\.cu\.j2, line \d"):
        render("k", tile=1)


def test_the_templates_of_the_house_are_found():
    with pytest.raises(UnknownNameError, match="kernel template 'no such template'"):
        render("no such template")

import sys
import textwrap

import pytest

from wqlab import registry
from wqlab.errors import UnknownNameError


def test_one_new_file_is_found_by_name_and_in_the_list(tmp_path, monkeypatch):
    package = tmp_path / "plugin_stems"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "brand_new.py").write_text(
        textwrap.dedent("""
            from wqlab.registry import register

            @register("bench", "brand_new")
            class BrandNew:
                pass
        """)
    )
    registry.names("bench")  # a module that is first imported below would register itself in what is thrown away
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._PACKAGES, "bench", [*registry._PACKAGES["bench"], "plugin_stems"])
    monkeypatch.setitem(registry._ENTRIES, "bench", dict(registry._ENTRIES["bench"]))
    try:
        assert registry.lookup("bench", "brand_new").__name__ == "BrandNew"
        assert "brand_new" in registry.names("bench")
    finally:
        for name in [n for n in sys.modules if n.startswith("plugin_stems")]:
            del sys.modules[name]


def test_unknown_names_suggest_the_closest():
    with pytest.raises(UnknownNameError, match="did you mean alpha_sweep"):
        registry.lookup("stem", "alpha_swep")
    with pytest.raises(UnknownNameError):
        registry.lookup("stem", "../alpha_sweep")


def test_two_modules_cannot_share_a_name():
    def other() -> None: ...

    registry.lookup("figure", "alpha_sweep")
    with pytest.raises(ValueError, match="registered by"):
        registry.register("figure", "alpha_sweep")(other)

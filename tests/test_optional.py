"""Libraries of extras: a missing library and a broken one are distinguished."""

import pytest

from bilevel._core.extras import require


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """An installed package whose import fails."""

    def install(name, source):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import compiled_part_of_it", "No module named 'compiled_part_of_it'"),
        ("from math import quadrature", "cannot import name 'quadrature'"),
        ("raise ImportError('libcu.so.12: cannot open shared object file')", "libcu.so.12"),
        ("import parrot_of_nobody", "No module named 'parrot_of_nobody'"),
    ],
)
def test_an_installed_package_that_fails_to_import_is_not_called_missing(source, said, broken):
    broken("parrot", source)
    with pytest.raises(ImportError, match=rf"`parrot` is installed, but importing it failed: .*{said}") as caught:
        require("parrot", "bench")
    assert "pip install" not in str(caught.value)


@pytest.mark.parametrize("module", ["no_such_parrot", "no_such_parrot.part", "heron.part"])
def test_a_missing_package_or_part_of_one_says_how_to_install_it(module, broken):
    broken("heron", "")
    with pytest.raises(ImportError, match=rf"needs `{module}`: pip install 'bilevel\[bench\]'"):
        require(module, "bench")

"""Every source that the package and the documents cite is in docs/references.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import references

PAGE = (references.ROOT / "docs" / "references.md").read_text(encoding="utf-8")


def test_every_arxiv_id_has_a_paper_and_a_line() -> None:
    assert set(references.arxiv_ids()) == set(references.PAPERS)
    for name in references.arxiv_ids():
        assert f"| [{name}](https://arxiv.org/abs/{name}) |" in PAGE


def test_every_file_belongs_to_a_project() -> None:
    assert [cited for cited in references.cited_files() if references.project_of(cited) is None] == []


def test_every_file_is_listed_under_its_project() -> None:
    for cited in references.cited_files():
        project = references.project_of(cited)
        assert project is not None
        listed = references.files_of(project)
        assert any(name == cited.path or name.endswith("/" + cited.path) for name in listed), cited
    for project in references.PROJECTS:
        for name in references.files_of(project):
            assert f"`{name.rpartition('/')[2]}`" in PAGE, name


def test_every_project_is_cited() -> None:
    assert [project.name for project in references.PROJECTS if not references.files_of(project)] == []


@pytest.mark.parametrize(
    ("path", "place", "project"),
    [
        ("stage3.py", "memcalc/x.py", "DeepSpeed"),
        ("megatron/core/a.py", "memcalc/x.py", "Megatron-LM and Megatron-Core"),
        ("models/llama/modeling_llama.py", "docs/x.md", "transformers"),
        ("torch/optim/adam.py", "docs/x.md", "PyTorch"),
        ("p2p.py", "memcalc/engines/deepspeed/pipeline.py", "DeepSpeed"),
    ],
)
def test_project_of(path: str, place: str, project: str) -> None:
    found = references.project_of(references.Cited(path, Path(place)))
    assert found is not None and found.name == project


def test_a_file_that_no_project_has() -> None:
    assert references.project_of(references.Cited("unheard/of.py", Path("docs/x.md"))) is None


def test_versions_are_those_that_are_pinned() -> None:
    versions = {project.name: references.version_of(project) for project in references.PROJECTS}
    assert versions["PyTorch"] == "2.13.0" and versions["DeepSpeed"] == "0.19.8"

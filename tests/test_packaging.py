"""What a release consists of: metadata, the sdist's files, and the files that describe the project."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from kvant.engines.vllm import versions
from kvant.version import VERSION

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_vllm_extra_admits_what_the_engine_accepts_and_nothing_else() -> None:
    [wanted] = [r for r in map(Requirement, PROJECT["optional-dependencies"]["vllm"]) if r.name == "vllm"]
    for minor in range(10, 60):
        for version in (f"0.{minor}.0", f"0.{minor}.3"):
            try:
                versions.check(version)
                accepted = True
            except ValueError:
                accepted = False
            assert wanted.specifier.contains(version) == accepted, version
    assert not wanted.specifier.contains("1.0")


def test_the_project_names_its_authors_and_its_home_in_one_way() -> None:
    home = PROJECT["urls"]["Homepage"]
    assert PROJECT["authors"]
    for name in ("Source", "Issues", "Changelog"):
        assert PROJECT["urls"][name].startswith(home)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["repository-code"] == home
    assert citation["version"] == VERSION
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_the_citation_names_the_five_papers() -> None:
    titles = [entry["title"] for entry in yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]]
    assert [title.partition(":")[0] for title in titles] == ["SAW-INT4", "OSCAR", "VecInfer", "SQuat", "Kitty"]


def test_the_changelog_has_the_usual_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    dated = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", release) for release in releases[1:]]
    assert all(dated), releases
    found = [Version(match[1]) for match in dated if match]
    assert found == sorted(found, reverse=True)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for release in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert sections or release.startswith("[Unreleased]")
        assert set(sections) <= kinds
        assert len(set(sections)) == len(sections)


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_templates_are_yaml_with_a_name(path: Path) -> None:
    found = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        return
    assert found["name"]
    if path.parent.name == "workflows":
        for script in re.findall(r"run: (?:\./)(\S+)", path.read_text()):
            assert (ROOT / script).exists(), f"{path.name} runs {script}"
    else:
        assert all(item["type"] in {"markdown", "textarea", "input", "dropdown"} for item in found["body"])


def test_the_sdist_has_documents_scripts_tests_results_and_sources(tmp_path: Path) -> None:
    """Everything that git tracks, but for what only the repository's host reads."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if not (ROOT / ".git").exists() or listed.returncode:
        pytest.skip(f"not a checkout that git reads: {listed.stderr.strip()}")
    tracked = listed.stdout.split("\n")
    script = "from setuptools import build_meta; import sys; print(build_meta.build_sdist(sys.argv[1]))"
    copied = tmp_path / "tree"
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (copied / name).parent.mkdir(parents=True, exist_ok=True)
            (copied / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=copied, capture_output=True, text=True, check=True
    )
    with tarfile.open(tmp_path / done.stdout.strip().splitlines()[-1]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    with tarfile.open(tmp_path / done.stdout.strip().splitlines()[-1]) as archive:
        [info] = [name for name in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name)]
        found = archive.extractfile(info)
        assert found is not None
        description = found.read().decode()
    links = re.findall(r"\]\(([^)]+)\)|src(?:set)?=\"([^\"]+)\"", description)
    assert len(links) > 20
    for target in ("".join(link) for link in links):
        assert target.startswith("https://"), f"a package index would look for {target} beside the README"
    elsewhere = (".github/", ".gitignore", ".gitattributes")
    missing = [name for name in tracked if name and not name.startswith(elsewhere) and name not in packed]
    assert not missing, missing
    assert not [name for name in packed if name.endswith((".so", ".pyc"))]

"""The pages and forms for contributors: links lead somewhere, versions agree, YAML is read."""

import re
from pathlib import Path

import pytest
import yaml

import pospre

GITHUB = Path(__file__).parents[1] / ".github"
FORMS = sorted(GITHUB.glob("ISSUE_TEMPLATE/[!c]*.yml"))
KINDS = ("textarea", "input", "dropdown", "checkboxes", "markdown")


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (.*)$", (GITHUB / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert versions[0] == pospre.__version__
    assert versions == sorted({*versions}, key=lambda text: [*map(int, text.split("."))])[::-1]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((GITHUB / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= {*citation}
    assert citation["version"] == pospre.__version__


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms_have_what_github_requires(form: Path) -> None:
    read = yaml.safe_load(form.read_text("utf-8"))
    assert read["name"] and read["description"]
    names = [part["id"] for part in read["body"]]
    assert len({*names}) == len(names)
    assert all(part["type"] in KINDS and part["attributes"]["label"] for part in read["body"])


def test_there_is_a_form_for_bugs_features_and_questions() -> None:
    assert [form.stem for form in FORMS] == ["bug", "feature", "question"]
    assert yaml.safe_load((GITHUB / "ISSUE_TEMPLATE/config.yml").read_text("utf-8"))


def test_ci_runs_what_must_pass_on_every_python_that_the_package_takes() -> None:
    workflow = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text("utf-8"))
    (job,) = workflow["jobs"].values()
    steps = [step["run"] for step in job["steps"] if "run" in step]
    assert steps == [".ci/run"] and (GITHUB.parent / steps[0]).is_file()
    # text: 3.10 would be read as 3.1
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]

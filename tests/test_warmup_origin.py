"""What a cache folder lacks: kernels that another Triton, target or version of the library made, C modules of another Python."""

import json
import re

import pytest

from kernel_runtime import cache, interpreting
from tests.warmup_tools import cache_folder, fake_driver, forget, small_plan

pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing can be compiled")


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder with the forward kernel for 2 streams, for sm_90"""
    from kernel_runtime.plan import Plan
    from kernel_runtime.warmup import compile_ahead

    with cache_folder(tmp_path_factory.mktemp("filled")) as folder:
        plan = Plan(small_plan().entries[:1])
        assert compile_ahead(plan, "sm_90", folder).count("compiled") == 1
        return plan, folder


def origin_of(filled):
    from kernel_runtime.targets import parse_target

    (_, spec), *_ = filled[0]
    return cache.entry_folder(filled[1], spec.cache_hash(parse_target("sm_90"))) / "origin.json"


def messages(filled, monkeypatch, plan=None, target="sm_90", **changes):
    """What look() says about the plan, where parts of its keys are other than they were when the folder was filled"""
    from kernel_runtime import origin
    from kernel_runtime.filler import Filler
    from kernel_runtime.targets import parse_target
    from kernel_runtime.warmup import look

    explain = origin.explain_key
    with monkeypatch.context() as patch:
        patch.setattr(origin, "explain_key", lambda target: {**explain(target), **changes})
        if changes:  # another key, then
            patch.setattr(Filler, "inspect", lambda self, row, folder=None: cache.EntryState("missing"))
        report = look(plan or filled[0], parse_target(target), filled[1])
    return report.messages


def test_what_filled_the_folder_is_said(filled, monkeypatch):
    assert messages(filled, monkeypatch) == []
    start = r"1 of the missing kernels are in \S+, but compiled "
    for changes, text in (
        ({"triton": "3.9.1"}, r"by triton 3\.\S+ \(this is 3\.9\.1\)"),
        ({"triton": "3.9.1", "assembler": "other"}, r"by triton 3\.\S+ \(this is 3\.9\.1\)"),
        ({"triton files": "0"}, "by another build of this version of Triton"),
        ({"assembler": "ptxas 99-90"}, r"with the assembler .*V\d.* \(this is ptxas 99-90\)"),
        ({"environment": "[('TRITON_X', '1')]"}, r"under other settings of Triton: \[.*\] \(these are \[\('TRITON_X', '1'\)\]\)"),
    ):
        said = messages(filled, monkeypatch, **changes)
        assert re.fullmatch(start + text, said[0]) and said[1].startswith("to fill the folder: the same command without"), said
    said = messages(filled, monkeypatch, target="sm_80")
    assert re.fullmatch(start + r"for sm_90 \(this is for sm_80\)", said[0]), said


def test_another_version_of_the_library(filled, monkeypatch):
    path = origin_of(filled)
    before = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(before), "source": "0" * 16}))
        assert messages(filled, monkeypatch, environment=json.loads(before)["environment"])[0].endswith(
            "compiled from other kernel sources, which is another version of this library"
        )
    finally:
        path.write_text(before)


def test_entries_of_a_launch_and_of_other_sizes(filled, monkeypatch):
    """Triton notes its version and the target alone; an entry of this version for other sizes explains nothing."""
    from kernel_runtime.plan import Plan

    other = Plan(small_plan().entries[2:3])
    assert [spec.name for _, spec in other] == [spec.name for _, spec in filled[0]]
    assert len(messages(filled, monkeypatch, other)) == 1
    path = origin_of(filled)
    before = path.read_text()
    try:
        path.unlink()
        assert "but compiled at a launch or by an earlier version" in messages(filled, monkeypatch, other)[0]
        assert re.search(r"by triton 3\.\S+ \(this is 3\.9\.1\)", messages(filled, monkeypatch, other, triton="3.9.1")[0])
        path.write_text("[]")
        assert len(messages(filled, monkeypatch, other)) == 1
    finally:
        path.write_text(before)


def test_every_part_has_its_words(filled):
    from kernel_runtime.origin import PARTS

    assert set(json.loads(origin_of(filled).read_text())) == set(PARTS)


def test_no_folder(filled, monkeypatch, tmp_path):
    assert messages((filled[0], tmp_path / "none"), monkeypatch)[0] == f"there is no folder {tmp_path / 'none'}"
    assert not (tmp_path / "none").exists()


def modules(folder):
    return {path.name.partition(".")[0]: path for path in folder.glob("*/*.so")}


@pytest.mark.parametrize("damage", ["another Python", "gone", "truncated"])
def test_c_modules_are_part_of_what_is_checked(tmp_path, monkeypatch, damage):
    """A folder that was filled under another Python has the kernels, but not the modules that start them: --check says so, and warmup builds
    them once, before the processes of a node all do. A module cut short would end the process that loads it."""
    import torch

    from kernel_runtime import warmup as module
    from kernel_runtime.plan import Plan
    from kernel_runtime.targets import parse_target

    target, plan = parse_target("sm_90"), Plan(small_plan().entries[:1])
    with cache_folder(tmp_path):
        module.compile_ahead(plan, "sm_90", tmp_path)
        assert {row.state for row in module.look(plan, target, tmp_path).rows} == {"cached"}
        launcher = modules(tmp_path)["__triton_launcher"]
        whole = launcher.read_bytes()
        if damage == "another Python":
            launcher.rename(launcher.with_name("__triton_launcher.cpython-399-x86_64-linux-gnu.so"))
        elif damage == "gone":
            launcher.unlink()
        else:
            launcher.write_bytes(whole[: len(whole) // 2])
        report = module.look(plan, target, tmp_path)
        reason = {"another Python": "there is only __triton_launcher.cpython-399", "gone": "is not there", "truncated": "truncated"}[damage]
        assert report.count("missing") == 1 and reason in report.rows[0].note, report.table()
        monkeypatch.setattr(module, "_pick_device", torch.device)  # the driver below stands in for a device that is not here
        monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("meta"))
        forget(plan)
        with fake_driver(target):
            report = module.warmup(plan, "cuda", threads=1)
        forget(plan)
        assert report.count("cached") == 1 and any("without what belongs to them" in message for message in report.messages), report
        assert len(launcher.read_bytes()) == len(whole)
        assert {row.state for row in module.look(plan, target, tmp_path).rows} == {"cached"}

"""What goes wrong with a cache folder: many processes at once, killed compilers, damage, no room, no rights, two versions."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from kernel_runtime import cache, interpreting
from kernel_runtime.warmup import _compile_part, compile_ahead
from tests.warmup_tools import ROOT, cache_folder, in_mount, mounts_possible, run_python, small_plan

pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing can be compiled")
needs_mounts = pytest.mark.skipif(not mounts_possible(), reason="needs `unshare -rm` and the right to mount a tmpfs inside it")

FOR_EVER = 3600.0  # seconds that a lock is waited for: pytest ends a test that waits before


@pytest.fixture
def folder(tmp_path):
    with cache_folder(tmp_path / "cache") as path:
        yield path


def key_of(plan, position=0):
    from kernel_runtime.targets import parse_target

    spec = plan.entries[position][1]
    return spec.cache_hash(parse_target("sm_90")), spec.name


def test_eight_processes_compile_each_kernel_once(folder, tmp_path, monkeypatch):
    """And each C launcher: a compiler that keeps a list is put in the place of the real one."""
    compiler, calls = tmp_path / "cc", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {os.environ.get("CC", "cc")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    plan = small_plan().to_json()
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        reports = list(pool.map(_compile_part, [plan] * 8, ["sm_90"] * 8, [str(folder)] * 8, range(8), [8] * 8, [FOR_EVER] * 8))
    for position in range(4):
        key, name = key_of(small_plan(), position)
        states = sorted(row.state for report in reports for row in report.rows if row.key == key)
        assert states == ["cached"] * 7 + ["compiled"], (name, states)
    assert not [m for report in reports for m in report.messages]
    # two signatures, forward and backward, and the helper module
    made = [name for name in ("__triton_launcher", "cuda_utils") for line in calls.read_text().splitlines() if f"{name}.c" in line]
    assert made == ["__triton_launcher"] * 2 + ["cuda_utils"], calls.read_text()


def hold(folder: Path, code: str) -> subprocess.Popen:
    """A process that has the lock of the first kernel of the plan and then runs `code`; returns once it has it."""
    program = f"""
import os, sys, time
from pathlib import Path
from kernel_runtime import cache
folder, key = Path({str(folder)!r}), {key_of(small_plan())[0]!r}
lock = cache.Lock(folder, key)
assert lock.try_acquire()
{code}
print("ready", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    return process


def test_killed_compiler(folder, monkeypatch):
    """Killed in the middle of an entry, while another process waits for it: the waiter takes over at once."""
    holder = hold(folder, """
entry = cache.entry_folder(folder, key)
(entry / f"tmp.pid_{os.getpid()}_x").mkdir(parents=True)
(entry / f"tmp.pid_{os.getpid()}_x" / "sinkhorn_fwd_kernel.cubin").write_bytes(b"half")
(entry / "sinkhorn_fwd_kernel.ttir").write_text("half")
""")  # fmt: skip
    refused, try_acquire = [], cache.Lock.try_acquire

    def attempt(lock: cache.Lock) -> bool:
        if try_acquire(lock):
            return True
        refused.append(lock.path.name)
        if len(refused) == 3:  # it waits, and comes again: now the holder dies
            holder.kill()
            holder.wait()
        return False

    monkeypatch.setattr(cache.Lock, "try_acquire", attempt)
    report = compile_ahead(small_plan(), "sm_90", folder, lock_timeout=FOR_EVER)
    assert refused == [key_of(small_plan())[0]] * 3  # and got the lock at the first attempt after the death
    assert [row.state for row in report.rows] == ["compiled"] * 4 and not report.messages, report.table()


def test_killed_while_its_assembler_runs(folder, tmp_path):
    """A real compilation, killed (by the memory limit, say) inside ptxas, which lives on: it holds no lock, and leaves nothing behind."""
    import triton

    started, assembler = tmp_path / "started", tmp_path / "ptxas"
    real = triton.knobs.nvidia.ptxas.path
    assembler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\necho $$ > {started}\nexec sleep 600\n')
    assembler.chmod(0o755)
    code = f"""
from kernel_runtime.warmup import compile_ahead
from tests.warmup_tools import small_plan
compile_ahead(small_plan(), "sm_90", {str(folder)!r})
"""
    compiler = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "TRITON_PTXAS_PATH": str(assembler)})
    try:
        deadline = time.monotonic() + 300.0
        while not (started.exists() and started.read_text()) and compiler.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        orphan = int(started.read_text())
    finally:
        compiler.kill()
        compiler.wait()
    try:
        report = compile_ahead(small_plan(), "sm_90", folder, lock_timeout=FOR_EVER)
        os.kill(orphan, 0)  # it was there all the time
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert [row.state for row in report.rows] == ["compiled"] * 4 and not report.messages, report.table()


def test_hung_compiler(folder):
    """Alive but stuck: after the timeout the kernel is compiled without the lock, and the message names the holder."""
    holder = hold(folder, "")
    try:
        report = compile_ahead(small_plan(), "sm_90", folder, lock_timeout=1.0)
    finally:
        holder.kill()
        holder.wait()
    assert [row.state for row in report.rows] == ["compiled"] * 4
    assert any(f"process {holder.pid} on" in message for message in report.messages), report.messages


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated binary": ("{name}.cubin", lambda p: p.write_bytes(p.read_bytes()[:1000]), "truncated"),
    "empty binary": ("{name}.cubin", lambda p: p.write_bytes(b""), "0 bytes are no binary"),
    "flipped bit": ("{name}.cubin", flip, "differs from what was written"),
    "binary gone": ("{name}.cubin", lambda p: p.unlink(), "No such file"),
    "group half written": ("__grp__{name}.json", lambda p: p.write_text('{"child_pa'), "JSONDecodeError"),
    "metadata empty": ("{name}.json", lambda p: p.write_text(""), "JSONDecodeError"),
    "metadata of another": ("{name}.json", lambda p: p.write_text('{"hash": "00"}'), "belongs to key 00"),
    "intermediate gone": ("{name}.ttir", lambda p: p.unlink(), "is gone"),
}


def test_damaged_entries(folder):
    """Each kind of damage is named, replaced, and the result is whole again."""
    plan = small_plan()
    compile_ahead(plan, "sm_90", folder)
    key, name = key_of(plan)
    for kind, (file, damage, reason) in DAMAGE.items():
        assert cache.inspect(folder, key, name, "cubin").state == "ok", kind
        damage(cache.entry_folder(folder, key) / file.format(name=name))
        state = cache.inspect(folder, key, name, "cubin")
        assert state.state == "corrupt" and reason in state.reason, (kind, state)
        report = compile_ahead(plan, "sm_90", folder)
        assert [row.state for row in report.rows] == ["repaired", "cached", "cached", "cached"], (kind, report.table())
        assert any("damaged cache entry replaced" in m for m in report.messages), kind
    assert not list(folder.glob(".bad-*"))


def test_an_entry_of_triton_alone_is_accepted(folder):
    """No checksums are there when Triton's own JIT wrote the entry; the binary's own header is checked instead."""
    plan = small_plan()
    compile_ahead(plan, "sm_90", folder)
    key, name = key_of(plan)
    (cache.entry_folder(folder, key) / cache.CHECKSUMS).unlink()
    assert cache.inspect(folder, key, name, "cubin").state == "ok"
    binary = cache.entry_folder(folder, key) / f"{name}.cubin"
    binary.write_bytes(binary.read_bytes()[:-100])
    assert cache.inspect(folder, key, name, "cubin").reason.endswith("truncated")


def test_two_versions_share_a_folder(folder, tmp_path):
    """The same kernel with another source has another key: both versions find their own, none throws out the other's."""
    source = (ROOT / "mhc_ops/sinkhorn/fwd.py").read_text()
    changed = source.replace("z = tl.load(", "z = 1.0 * tl.load(")
    assert changed != source
    old = tmp_path / "old"
    for package in ("kernel_runtime", "mhc_ops", "reference"):
        shutil.copytree(ROOT / package, old / package)
    (old / "mhc_ops/sinkhorn/fwd.py").write_text(changed)
    code = f"""
import sys
from kernel_runtime.warmup import compile_ahead
import torch
from kernel_runtime.plan import Plan
from mhc_ops.sinkhorn.fwd import forward_spec
plan = Plan.of([("mhc_ops.sinkhorn", forward_spec(torch.float32, 4, 3, "v4"))])
print(*[f"{{row.key}} {{row.state}}" for row in compile_ahead(plan, "sm_90", {str(folder)!r}).rows])
"""
    results = []
    for root in (ROOT, old, ROOT, old):
        env = {**os.environ, "PYTHONPATH": str(root)}
        run = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        results.append(run.stdout.split())
    assert [state for _, state in results] == ["compiled", "compiled", "cached", "cached"]
    assert results[0][0] == results[2][0] != results[1][0] == results[3][0]


REPORT = """
import json, sys
from pathlib import Path
from kernel_runtime.warmup import compile_ahead
from warmup_tools import small_plan
report = compile_ahead(small_plan(tuple(map(int, sys.argv[2:])) or (2, 4)), "sm_90", sys.argv[1])
print(json.dumps({"states": [r.state for r in report.rows], "messages": report.messages, "folder": report.folder}))
"""


THREADS = """
import json, sys
from kernel_runtime.filler import Filler, Report
from kernel_runtime.targets import parse_target
from warmup_tools import small_plan
target, report = parse_target("sm_90"), Report("sm_90", sys.argv[1])
filler = Filler(small_plan(tuple(map(int, sys.argv[2:]))).for_target(target), target, report, 3600.0, measure=False)
filler.choose_folder()
filler.run(0, 1, threads=THREADS)
assert not any(filler.inspect(row).state != "ok" for row in report.rows)
print(json.dumps({"states": [r.state for r in report.rows], "messages": report.messages, "folder": report.folder}))
"""


@needs_mounts
def test_full_disk(tmp_path):
    """A folder that runs full: the message says so, and the kernels end up in a private folder of the node."""
    mount = tmp_path / "small"
    mount.mkdir()
    result = in_mount([sys.executable, "-c", REPORT, str(mount / "cache")], mount, "size=128k")
    data = json.loads(result.stdout) if result.returncode == 0 else pytest.fail(result.stderr)
    assert data["states"] == ["compiled"] * 4
    assert "is full" in data["messages"][0] and not data["folder"].startswith(str(mount)), data


@needs_mounts
@pytest.mark.parametrize("threads", [1, 4])
def test_disk_that_fills_up_on_the_way(tmp_path, threads):
    """Room for the probe and a first kernel, not for all: what was made is carried over. Of several threads all move on."""
    mount = tmp_path / "small"
    mount.mkdir()
    report = REPORT if threads == 1 else THREADS.replace("THREADS", str(threads))
    result = in_mount([sys.executable, "-c", report, str(mount / "cache"), *"234568"], mount, "size=1200k")
    data = json.loads(result.stdout) if result.returncode == 0 else pytest.fail(result.stderr)
    assert set(data["states"]) == {"compiled"}, data
    assert any("No space left" in m for m in data["messages"]) and not data["folder"].startswith(str(mount)), data


def test_folder_left_while_a_kernel_compiles(folder, tmp_path, monkeypatch):
    """By another thread: Triton puts the kernel into the new folder. It counts as made here, and has its checksums."""
    from kernel_runtime.filler import Filler, Report
    from kernel_runtime.targets import parse_target

    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    target, report = parse_target("sm_90"), Report("sm_90", str(folder))
    filler = Filler(small_plan().for_target(target), target, report, FOR_EVER, measure=False)
    spec = filler.entries[1][1]
    real = type(spec).compile

    def compile(self, target):
        if self is spec:
            assert filler._leave(folder, "full")
        return real(self, target)

    monkeypatch.setattr(type(spec), "compile", compile)
    filler.choose_folder()
    filler.run(0, 1)
    assert report.folder != str(folder) and [row.state for row in report.rows] == ["compiled"] * 4, report.table()
    for row in report.rows:
        assert filler.inspect(row).state == "ok" and (cache.entry_folder(Path(report.folder), row.key) / cache.CHECKSUMS).exists(), row


@needs_mounts
def test_read_only_folder(tmp_path):
    """Complete: used as it is. One kernel short: copied to a private folder, and only that one is compiled."""
    made, mount = tmp_path / "made", tmp_path / "mount"
    mount.mkdir()
    with cache_folder(made):
        compile_ahead(small_plan(), "sm_90", made)
    target = mount / "cache"
    adopt = f"""{sys.executable} -c 'from kernel_runtime.warmup import compile_ahead; from warmup_tools import small_plan
compile_ahead(small_plan(), "sm_90", "{target}")'"""
    freeze = f'mount -o remount,ro "{mount}"'
    whole = in_mount([sys.executable, "-c", REPORT, str(target)], mount, "size=64m", f'cp -r "{made}" "{target}" && {adopt} && {freeze}')
    data = json.loads(whole.stdout) if whole.returncode == 0 else pytest.fail(whole.stderr)
    assert data == {"states": ["cached"] * 4, "messages": [], "folder": str(target)}
    entry = cache.entry_folder(target, key_of(small_plan())[0])
    short = in_mount([sys.executable, "-c", REPORT, str(target)], mount, "size=64m",
                     f'cp -r "{made}" "{target}" && {adopt} && rm -r "{entry}" && {freeze}')  # fmt: skip
    data = json.loads(short.stdout) if short.returncode == 0 else pytest.fail(short.stderr)
    assert data["states"] == ["compiled", "adopted", "adopted", "adopted"] and data["folder"] != str(target), data
    assert "not writable" in data["messages"][0]


def test_folder_that_cannot_exist(tmp_path):
    """No mount needed: a folder below a file. Training can start, the kernels are elsewhere."""
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    result = run_python(REPORT.replace("sys.argv[1]", repr(str(tmp_path / "file" / "cache"))), TMPDIR=str(tmp_path / "tmp"))
    data = json.loads(result.stdout) if result.returncode == 0 else pytest.fail(result.stderr)
    assert data["states"] == ["compiled"] * 4 and "not writable" in data["messages"][0]


def test_foreign_fallback_is_refused(tmp_path, monkeypatch):
    """A folder in /tmp that others may write to is never trusted with code."""
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    good, _ = cache.fallback_folder(Path("/somewhere"))
    assert good is not None and good.parent == tmp_path and good.stat().st_mode & 0o777 == 0o700
    for mode in (0o777, 0o770, 0o702):
        good.chmod(mode)
        other, _ = cache.fallback_folder(Path("/somewhere"))
        assert other is None or other.parent != tmp_path, oct(mode)

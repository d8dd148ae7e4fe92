"""Checkpoint folders of transformers into the sharded trainer and back: bit-equal on one and two processes, and what does not fit is named."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.dist_util import COLLECTIVE_LIMIT, run_distributed
from tests.test_hf_parity import KINDS, YARN, hf_config, hf_model
from tests.trainer_util import SMALL, gathered, plain_model, run_config, sharded
from train_example import checkpoint, hf_checkpoint
from train_example import parallel as parallel_module
from train_example.config import FLASH, PRO, TINY
from train_example.data import Dataset, Text
from train_example.hf_checkpoint import check_target, load_folder, owned, save_folder
from train_example.hf_config import config_from_folder, config_from_hf, config_to_hf
from train_example.hf_map import from_hf
from train_example.metrics import read_metrics
from train_example.model import fp32_islands
from train_example.moe import hash_table
from train_example.parallel import init_parallel, shutdown
from train_example.run_config import ConfigError
from train_example.train import build_model, main

transformers = pytest.importorskip("transformers", reason="transformers is the oracle, a dependency of the tests alone")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="comes with transformers")

BLOCK = 3000  # bytes: most matrices cross in several blocks, of a number of rows that divides nothing
SIZES = {"vocab_size": 264, "index_n_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """0.0 and -0.0 differ here."""
    as_bits = {torch.float32: torch.int32, torch.int64: torch.int64}
    return got.keys() == want.keys() and all(
        got[n].dtype == want[n].dtype and torch.equal(got[n].view(as_bits[got[n].dtype]), want[n].view(as_bits[want[n].dtype])) for n in want
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """theirs: in files of 40 kB with an index; single: one file; bf16: its large matrices in bf16; ours.pt: the tensors by our names."""
    root = tmp_path_factory.mktemp("hf")
    model = hf_model(hf_config(["window", "csa", "hca"], 1, **SIZES), seed=0)
    with torch.no_grad():
        model.lm_head.weight[0, :7] = -0.0
        model.model.layers[1].mlp.experts.down_proj[3, 5] = -0.0
    model.save_pretrained(root / "theirs", max_shard_size="40KB")
    model.save_pretrained(root / "single")
    torch.save(from_hf(model.state_dict()), root / "ours.pt")
    transformers.DeepseekV4ForCausalLM.from_pretrained(root / "single", dtype=torch.bfloat16).save_pretrained(root / "bf16")
    assert (root / "theirs" / "model.safetensors.index.json").exists()
    assert (root / "single" / "model.safetensors").exists()
    return root


def _round_trips(rank: int, world: int, folder: str) -> dict[str, Any]:
    root = Path(folder)
    want = torch.load(root / "ours.pt")
    hf_checkpoint.BLOCK_BYTES = BLOCK
    sent: list[int] = []
    broadcast = dist.broadcast

    def record(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)

    hf_checkpoint.dist.broadcast = record
    if rank:  # rank 0 alone opens files
        hf_checkpoint._Folder = hf_checkpoint._safetensors = None
    found: dict[str, Any] = {}
    for ep, source in ((2, "theirs"), (1, "single")):
        config = run_config(ep=ep, model=dataclasses.asdict(config_from_folder(root / source)))
        parallel = init_parallel(torch.device("cpu"), ep, COLLECTIVE_LIMIT)
        model = build_model(config, parallel, fill=False)
        sent.clear()
        said = load_folder(root / source, model)
        found[source] = {"equal": same_bits(gathered(checkpoint.named_tensors(model)), want), "largest": max(sent), "said": said}
        files = save_folder(root / f"saved_ep{ep}", model, config.model, file_bytes=50_000 if ep == 2 else 2**30)
        found[source]["files"] = len(files)
    try:
        load_folder(root / "nothing", model)
    except ConfigError as error:
        found["refused"] = str(error)
    # with an MTP block, from fresh weights
    model, _ = sharded(run_config(ep=2))
    before = gathered(checkpoint.named_tensors(model))
    save_folder(root / "with_mtp", model, SMALL)
    again = build_model(run_config(ep=1), init_parallel(torch.device("cpu"), 1, COLLECTIVE_LIMIT), fill=False)
    load_folder(root / "with_mtp", again)
    found["mtp"] = same_bits(gathered(checkpoint.named_tensors(again)), before)
    return found


@pytest.fixture(scope="module")
def two(folders) -> list[dict[str, Any]]:
    return run_distributed(_round_trips, 2, str(folders))


@pytest.mark.parametrize("source", ["theirs", "single"])
def test_two_processes_load_the_same_bits_a_block_at_a_time(two, source):
    for found in two:
        assert found[source]["equal"]
        assert BLOCK // 2 < found[source]["largest"] <= BLOCK
    assert two[0]["mtp"]
    assert two[1]["mtp"]


@pytest.mark.parametrize(("folder", "files"), [("saved_ep2", True), ("saved_ep1", False)])
def test_transformers_loads_what_two_processes_save(two, folders, folder, files):
    assert (two[0]["theirs"]["files"] > 3, two[0]["single"]["files"]) == (True, 1)
    assert (folders / folder / "model.safetensors.index.json").exists() == files
    model, info = transformers.DeepseekV4ForCausalLM.from_pretrained(folders / folder, output_loading_info=True)
    assert not any(info.values()), info
    assert same_bits(from_hf(model.state_dict()), torch.load(folders / "ours.pt"))
    assert not list(folders.glob(".*.tmp"))


def test_transformers_skips_the_mtp_block(two, folders):
    model, info = transformers.DeepseekV4ForCausalLM.from_pretrained(folders / "with_mtp", output_loading_info=True)
    assert not any(info.values()), info
    names = json.loads((folders / "with_mtp" / "config.json").read_text())
    assert names["num_nextn_predict_layers"] == 1
    assert config_from_folder(folders / "with_mtp") == SMALL
    with safetensors_torch.safe_open(folders / "with_mtp" / "model.safetensors", "pt") as file:
        assert {"mtp.0.e_proj.weight", "mtp.0.attn.wq_a.weight", "mtp.0.ffn.experts.3.w2.weight", "mtp.0.hc_head_fn"} <= set(file.keys())
    table = model.model.layers[0].mlp.gate.tid2eid
    assert torch.equal(table, hash_table(SMALL, 0)), "the routing table is part of the checkpoint"


def test_a_refusal_reaches_every_rank(two):
    for found in two:
        assert "nothing holds neither model.safetensors nor model.safetensors.index.json" in found["refused"]


def test_one_process_and_module_names_and_bf16(folders, tmp_path):
    want = torch.load(folders / "ours.pt")
    config = run_config(model=dataclasses.asdict(config_from_folder(folders / "single")))
    parallel = init_parallel(torch.device("cpu"), 1, COLLECTIVE_LIMIT)
    model = build_model(config, parallel, fill=False)
    state = transformers.DeepseekV4ForCausalLM.from_pretrained(folders / "single").state_dict()
    (tmp_path / "modules").mkdir()
    shutil.copy(folders / "single" / "config.json", tmp_path / "modules")
    safetensors_torch.save_file({name: t.contiguous() for name, t in state.items()}, tmp_path / "modules" / "model.safetensors")
    for source in (tmp_path / "modules", folders / "saved_ep1") if (folders / "saved_ep1").exists() else (tmp_path / "modules",):
        assert config_from_folder(source) == config.model
        load_folder(source, model)
        assert same_bits(gathered(checkpoint.named_tensors(model)), want)
    (tmp_path / "link").symlink_to("saved")
    for name in ("link", "saved", "link"):
        save_folder(tmp_path / name, model, config.model)
    assert (tmp_path / "link").is_symlink() and {path.name for path in tmp_path.iterdir()} == {"link", "modules", "saved"}
    again = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path / "saved")
    assert same_bits(from_hf(again.state_dict()), want)
    said = load_folder(folders / "bf16", model)
    assert "bfloat16, float32, int64" in said
    got = gathered(checkpoint.named_tensors(model))
    assert torch.equal(got["head.weight"], want["head.weight"].bfloat16().float())
    assert torch.equal(got["layers.1.moe.experts.w_down"], want["layers.1.moe.experts.w_down"].bfloat16().float())
    shutdown()


@pytest.mark.parametrize(("world", "ep", "rank"), [(6, 2, 3), (9, 3, 5), (4, 2, 3), (3, 1, 2), (5, 1, 1), (1, 1, 0)])
def test_owned_is_what_a_rank_holds(monkeypatch, world, ep, rank):
    """Every parameter, with a process group that only pretends. 6 over ep 2 leaves 3, which divide no dimension of an expert.

    A world size each: torch remembers a mesh of the same shape, and with it the rank that it was made for.
    """
    config = run_config(model={"num_experts": 6})
    monkeypatch.setitem(parallel_module.BACKENDS, "cpu", "fake")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        model = plain_model(config)
        full = {name: param.detach().clone() for name, param in model.named_parameters()}
        parallel_module.parallelize(model, fp32_islands(model), init_parallel(torch.device("cpu"), ep, COLLECTIVE_LIMIT), torch.float32)
        strided = 0
        for name, param in model.named_parameters():
            part = tuple(slice(start, end) for start, end in owned(param))
            assert torch.equal(full[name][part], param.to_local()), (name, param.placements, part)
            strided += any(hasattr(placement, "split_factor") for placement in param.placements)
        assert (strided > 0) == (world in (6, 9))
    finally:
        dist.destroy_process_group()


def changed(source: Path, target: Path, change) -> Path:
    """A copy of a folder with one file, whose tensors `change` alters in place."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    tensors = safetensors_torch.load_file(source / "model.safetensors")
    change(tensors)
    safetensors_torch.save_file(tensors, target / "model.safetensors")
    return target


GATE = "model.layers.1.ffn.gate.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("head.weight"), "missing head.weight$"),
        (lambda t: t.pop("model.layers.2.ffn.experts.3.w1.weight"), r"missing model\.layers\.2\.ffn\.experts\.3\.w1\.weight$"),
        (lambda t: [t.pop(name) for name in list(t) if ".w2." in name], r"missing .*ffn\.experts\.0\.w2\.weight, .* and 11 more$"),
        (lambda t: t.update({"model.layers.7.extra": torch.ones(1)}), r"of no use to this model: model\.layers\.7\.extra$"),
        (lambda t: t.update({GATE + "_scale": torch.ones(1)}), "_scale; quantised weights are not supported$"),
        (lambda t: t.update({GATE: torch.ones(4, 47)}), r"layers\.1\.ffn\.gate\.weight is \[4, 47\] F32, want \[4, 48\] F32 or BF16 or F16$"),
        (lambda t: t.update({GATE: torch.ones(4, 48, dtype=torch.float8_e4m3fn)}), r"gate\.weight is \[4, 48\] F8_E4M3, want \[4, 48\] F32"),
        (lambda t: t.update({GATE: torch.ones(4, 48, dtype=torch.float64)}), r"gate\.weight is \[4, 48\] F64, want"),
    ],
)
def test_what_does_not_fit_is_named(folders, tmp_path, change, message):
    folder = changed(folders / "single", tmp_path / "changed", change)
    shapes = {name: tensor.shape for name, tensor in torch.load(folders / "ours.pt").items()}
    with pytest.raises(ConfigError, match=message) as stop:
        hf_checkpoint._plan(hf_checkpoint._Folder(folder), shapes, {name: not name.endswith("tid2eid") for name in shapes}, with_mtp=False)
    assert str(stop.value).startswith(f"{folder} does not fit the model: ")


def test_damaged_folders_are_named(folders, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(folders / "theirs", copy)
    first = next(iter(sorted(copy.glob("model-00001*"))))
    shapes = {name: tensor.shape for name, tensor in torch.load(folders / "ours.pt").items()}

    def plan() -> None:
        hf_checkpoint._plan(hf_checkpoint._Folder(copy), shapes, {name: not name.endswith("tid2eid") for name in shapes}, with_mtp=False)

    plan()
    whole = first.read_bytes()
    first.write_bytes(whole[:-5])
    with pytest.raises(ConfigError, match=f"{first.name} cannot be read"):
        plan()
    first.unlink()
    with pytest.raises(ConfigError, match=f"{first.name} cannot be read"):
        plan()
    safetensors_torch.save_file({"other": torch.ones(1)}, first)
    with pytest.raises(ConfigError, match=f"{first.name} lacks .*index.json says it has"):
        plan()
    (copy / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"index\.json is damaged"):
        plan()


def arguments(folder: Path, text: Path, *more: str) -> list[str]:
    settings = ["--device", "cpu", "--batch", "2", "--seq-len", "24", "--eval-every", "0", "--data", str(text), "--warmup-steps", "1"]
    return ["--out", str(folder), *settings, *more]


def test_train_from_and_to_transformers(folders, tmp_path, capsys):
    """The first loss is that of transformers on the same tokens; a resume needs the first folder no more; the export loads."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    source, run, export = tmp_path / "source", tmp_path / "run", tmp_path / "export"
    shutil.copytree(folders / "single", source)
    common = ["--load-hf", str(source), "--save-hf", str(export), "--model.kl-coefficient", "0.5", "--save-every", "1", "--keep", "-1"]
    assert main(arguments(run, text, *common, "--steps", "2")) == 0
    theirs = transformers.DeepseekV4ForCausalLM.from_pretrained(source)
    ids, labels = Dataset(Text([text]), 24, 0.1, 0).batch(0, 2)
    want = F.cross_entropy(theirs(ids).logits.detach().flatten(0, 1), labels.flatten())
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[0]["lm_loss"] == pytest.approx(float(want), rel=1e-5)
    assert f"weights of {source}" in capsys.readouterr().out
    trained = transformers.DeepseekV4ForCausalLM.from_pretrained(export).state_dict()
    assert not torch.equal(trained["lm_head.weight"], theirs.lm_head.weight)
    # the first step again, from its checkpoint, without the folder it came from
    shutil.rmtree(source)
    other = ["--config", str(run / "config.json"), "--out", str(tmp_path / "again"), "--resume", str(run / "checkpoints" / "step_00000001")]
    assert main(other) == 0
    assert read_metrics(tmp_path / "again" / "metrics.jsonl")[0]["loss"] == rows[1]["loss"]
    again = transformers.DeepseekV4ForCausalLM.from_pretrained(export).state_dict()
    assert same_bits(from_hf(again), from_hf(trained)), "routing tables of the imported model included"
    assert not torch.equal(again["model.layers.0.mlp.gate.tid2eid"], hash_table(config_from_folder(export), 0))
    capsys.readouterr()
    for more, message in (
        (["--load-hf", str(tmp_path / "none")], "none holds no config.json"),
        (["--save-hf", str(run)], "exists and is no checkpoint that this trainer wrote"),
        (["--save-hf", "x", "--model.compress-ratios", "4,8,16,0"], r"save_hf: model.compress_ratios has [8, 16] besides csa_ratio"),
        (["--new-data"], "new_data says how to resume"),
        (["--load-hf", str(export), "--model.hidden-size", "56", "--out", str(tmp_path / "x")], "does not fit the model: "),
        (["--load-hf", str(export), "--model.mtp-layers", "1", "--out", str(tmp_path / "y")], "saves no MTP block: --model.mtp-layers 0"),
    ):
        assert main(arguments(tmp_path / "refused", text, *more)) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_export_replaces_only_its_own(tmp_path):
    check_target(tmp_path / "new")
    check_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(SMALL)))
    check_target(tmp_path)
    for content in ("{}", "not JSON"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match="is no checkpoint that this trainer wrote"):
            check_target(tmp_path)


def test_export_is_whole_at_any_time(tmp_path, monkeypatch):
    """Killed or refused between any two of the file system's operations, a whole export is there, the old one or the new one."""
    folder, new = tmp_path / "export", tmp_path / ".export.tmp"

    def make(path: Path, content: str) -> None:
        path.mkdir()
        (path / "weights").write_text(content)

    def whole() -> set[str]:
        return {(path / "weights").read_text() for path in tmp_path.iterdir() if (path / "weights").exists() and path != new}

    states: list[set[str]] = []
    rename = os.replace
    make(folder, "old")
    make(new, "new")
    monkeypatch.setattr(hf_checkpoint.os, "replace", lambda a, b: (states.append(whole()), rename(a, b), states.append(whole())))
    hf_checkpoint._publish(new, folder)
    assert states == [{"old"}, {"old"}, {"old"}, {"old", "new"}]
    assert [path.name for path in tmp_path.iterdir()] == ["export"] and whole() == {"new"}

    make(new, "newer")
    monkeypatch.setattr(hf_checkpoint.os, "replace", lambda a, b: rename(a, b) if a != new else (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        hf_checkpoint._publish(new, folder)
    assert (folder / "weights").read_text() == "new"


@pytest.mark.parametrize("config", [TINY, SMALL, FLASH, PRO, dataclasses.replace(SMALL, yarn_factor=1.0, kl_target="marginal", hash_seed=3)])
def test_config_goes_both_ways(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config, eos_token_id=256)))
    without = dataclasses.replace(config, mtp_layers=0)
    if config.yarn_factor == 1:  # nothing is stretched, so nothing says how
        blank = dataclasses.replace(TINY)
        without = dataclasses.replace(without, yarn_original_length=blank.yarn_original_length)
    assert config_from_folder(tmp_path) == without, "no file there has an MTP block"
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = {name: getattr(config, name) for name in ("kl_coefficient", "kl_target", "hash_seed", "mtp_weight", "mtp_compress_ratio")}
    assert config_from_hf(theirs, **ours) == dataclasses.replace(without, mtp_layers=config.mtp_layers)
    assert theirs.eos_token_id == 256


def test_published_form_of_config(tmp_path):
    """The keys that the published checkpoints have, against transformers' reading of them."""
    raw = hf_config(["window", "csa", "hca"], 1).to_dict()
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor", "initializer_range"):
        raw.pop(key)
    yarn = {"type": "yarn", **{key: value for key, value in YARN.items() if key != "rope_type"}}
    raw |= {"compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1, "qk_rope_head_dim": 16, "rope_scaling": yarn}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    want = config_from_hf(transformers.DeepseekV4Config(**json.loads(json.dumps(raw))), mtp_layers=0)
    assert want.compress_ratios == (0, 4, 128)
    assert want.yarn_factor == 4.0
    assert config_from_folder(tmp_path) == want
    for change, message in (
        ({"compress_ratios": [0, 4, 64]}, r"config.json: config.compress_ratios must be of \[0, 4, 128\], got \[64\]"),
        ({"model_type": "llama"}, "model_type must be 'deepseek_v4', got 'llama'"),
        ({"n_shared_experts": 2}, "config.n_shared_experts must be 1"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
        with pytest.raises(ValueError, match=message):
            config_from_folder(tmp_path)
    del raw["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"config.json lacks hidden_size"):
        config_from_folder(tmp_path)
    assert set(KINDS.values()) == {"sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"}

"""Verbs for trained models: what a run leaves can be exported, measured and asked for text."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparseloco.model import build_model, find_model, load_model, load_tokenizer
from tests.cli import Call, enter, run, run_file, text

CONFIG = run_file()
NUMBERS = ("hidden_size", "num_layers", "num_heads", "intermediate_size")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in it, trained once for all tests."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        enter(folder, patch)
        Path("run.toml").write_text(CONFIG)
        Path("text.txt").write_text(text())
        assert run("train", "run.toml", "--out", "mine", "--json") == 0
    return folder


@pytest.fixture
def call(trained: Path, tmp_path: Path, cli: Call) -> Call:
    """In a copy of that folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return cli


def without_numbers(**named: str) -> str:
    """The configuration with a model by name or path."""
    lines = [line for line in CONFIG.splitlines() if not line.startswith(NUMBERS)]
    keys = [f"{name} = {json.dumps(value)}" for name, value in named.items()]
    at = lines.index("[model]") + 1
    return "\n".join([*lines[:at], *keys, *lines[at:]])


def test_exported_model_is_the_anchor_that_was_measured(call: Call) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ended = call("export", "mine", "--out", "deep/out")
    assert ended.code == 0, ended.err
    files = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert ended.out == f"model: deep/out ({', '.join(files)})\n"
    model: Any = AutoModelForCausalLM.from_pretrained("deep/out").eval()
    words = AutoTokenizer.from_pretrained("deep/out")
    batch = torch.tensor([words("Line 7 says that").input_ids])
    with torch.no_grad():
        assert torch.equal(model(batch).logits, load_model(find_model(Path("mine")))(batch).logits)
    assert words.decode(batch[0]) == "Line 7 says that"
    assert (model.config.use_cache, model.generation_config.use_cache) == (True, True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    summary = json.loads(Path("mine/summary.json").read_text())
    measured = json.loads(call("eval", "mine", "--json").out)
    assert measured["loss"] == summary["held_out_loss"]
    assert measured["bits_per_byte"] == summary["bits_per_byte"]
    assert measured["perplexity"] == math.exp(summary["held_out_loss"])
    again = json.loads(call("export", "mine", "--out", "deep/out", "--json").out)
    assert again == {"folder": "deep/out", "files": files}


@pytest.mark.parametrize("option", [(), ("--processes",)], ids=["simulation", "processes"])
@pytest.mark.usefixtures("forked_workers")
def test_both_worlds_keep_the_same_model(call: Call, option: tuple[str, ...]) -> None:
    assert call("train", "run.toml", "--out", "again", *option, "--json").code == 0
    kept, before = load_model(Path("again/model")), load_model(Path("mine/model"))
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), before.parameters(), strict=True))


def test_a_run_need_not_keep_its_model(call: Call) -> None:
    assert call("train", "run.toml", "--out", "mine", "--overwrite", "--no-model", "--json").code == 0
    assert not Path("mine/model").exists()
    ended = call("generate", "mine")
    assert (ended.code, ended.err) == (
        2,
        "error: 'mine': must hold model/, which a finished run leaves there; let the run finish, without --no-model in "
        "train and with --models in compare\n",
    )


def test_comparisons_keep_models_when_asked(call: Call) -> None:
    Path("run.toml").write_text(f'{CONFIG}\n[[compare]]\nlabel = "A"\n\n[[compare]]\nlabel = "B"\nk = 4\n')
    assert call("compare", "run.toml", "--out", "both").code == 0
    assert not Path("both/a/model").exists()
    assert call("compare", "run.toml", "--out", "both", "--overwrite", "--models").code == 0
    assert load_tokenizer(Path("both/b/model")).eos_token_id == 0
    ended = call("export", "both", "--out", "x")
    assert ended.err == "error: 'both': must be one run, but holds a, b; name both/a\n"


def test_generate_follows_the_seed(call: Call) -> None:
    arguments = ("generate", "mine", "--prompt", "Line", "--max-tokens", "8")
    first = json.loads(call(*arguments, "--seed", "3", "--json").out)
    assert json.loads(call(*arguments, "--seed", "3", "--json").out) == first
    assert json.loads(call(*arguments, "--seed", "4", "--json").out)["text"] != first["text"]
    assert (first["prompt"], first["seed"], first["tokens"] <= 8) == ("Line", 3, True)
    streamed = call(*arguments, "--seed", "3")
    assert (streamed.out, streamed.err) == (f"Line{first['text']}\n", "")
    likeliest = [call(*arguments, "--seed", seed, "--temperature", "0").out for seed in ("1", "2")]
    assert likeliest[0] == likeliest[1]
    assert call("generate", "mine", "--max-tokens", "4").code == 0


def test_generate_ends_with_the_positions(call: Call) -> None:
    ended = call("generate", "mine", "--prompt", "Line", "--max-tokens", "999", "--json")
    assert ended.code == 0
    assert ended.err.startswith("warning: max_tokens=999: the model has 16 positions and the prompt takes ")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--max-tokens", "0"), "max_tokens=0: must be at least 1; use 100"),
        (("--temperature", "-1"), "temperature=-1.0: must be at least 0 and finite; use 0.8, or 0 for no chance"),
        (
            ("--prompt", "x " * 40),
            "prompt=80 tokens: must leave room in the model's 16 positions; give a shorter prompt",
        ),
    ],
)
def test_generate_refuses(call: Call, arguments: tuple[str, ...], error: str) -> None:
    ended = call("generate", "mine", *arguments)
    assert (ended.code, ended.err) == (2, f"error: {error}\n")


def test_eval_of_another_text_counts_every_byte(call: Call) -> None:
    Path("other.txt").write_text(text(range(5000, 5200)))
    figures = json.loads(call("eval", "mine", "--data", "other.txt", "--max-tokens", "100000", "--json").out)
    words = load_tokenizer(Path("mine/model"))
    tokenizer: Any = words
    pieces = len(tokenizer.encode(Path("other.txt").read_text()))
    # Documents are cut out of the file, and each has an end token behind it.
    assert pieces <= figures["tokens"] <= pieces + 10
    nats = figures["bits_per_byte"] * Path("other.txt").stat().st_size * math.log(2)
    assert nats == pytest.approx(figures["loss"] * figures["tokens"], rel=1e-9)
    ended = call("eval", "mine/model", "--data", "other.txt")
    assert ended.out.startswith("other.txt: loss ")
    assert " bits per byte, on " in ended.out


def test_eval_needs_a_text(call: Call) -> None:
    ended = call("eval", "mine/model")
    assert ended.err == ("error: --data: missing, since 'mine/model' is no run with text of its own; name a text\n")
    Path("text.txt").write_text(text(range(1, 2000)))
    ended = call("eval", "mine")
    assert ended.err.startswith("error: data='text.txt': must still be the text of the run (hash ")


def test_folders_without_a_model(call: Call) -> None:
    Path("other").mkdir()
    ended = call("export", "other", "--out", "x")
    assert ended.err == "error: 'other': must be a run folder or the folder of a model; check the path\n"
    Path("other/letter.txt").write_text("mine")
    ended = call("export", "mine", "--out", "other")
    assert ended.err == "error: --out 'other': must be new, empty or hold an earlier export; choose another\n"
    assert Path("other/letter.txt").read_text() == "mine"
    ended = call("export", "mine", "--out", "text.txt/x")
    assert ended.err.startswith("error: 'text.txt/x': must be a folder that can be written (")


def test_tasks_need_the_extra(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = call("eval", "mine", "--tasks", "tasks")
    assert (ended.code, ended.err) == (
        2,
        "error: --tasks 'tasks': needs lm-eval, which is not installed; run: pip install \"sparseloco[eval]\"\n",
    )


def test_tasks_are_those_of_the_folder(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for lm-eval; the slow test below runs the real one."""
    Path("tasks").mkdir()
    Path("tasks/lines.yaml").write_text("task: lines\n")
    seen: dict[str, Any] = {}

    def simple_evaluate(**settings: Any) -> dict[str, Any]:
        seen.update(settings)
        if settings["tasks"] == ["broken"]:
            raise KeyError("metric")
        return {"results": {"lines": {"alias": "lines", "acc,none": 0.5, "acc_stderr,none": "N/A", "acc,first": 1}}}

    names = ["lines"]
    stand_ins = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.models.huggingface": {"HFLM": lambda **settings: settings},
        "lm_eval.tasks": {"TaskManager": lambda **settings: SimpleNamespace(all_subtasks=names, **settings)},
    }
    for name, content in stand_ins.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    ended = call("eval", "mine", "--tasks", "tasks", "--json")
    assert json.loads(ended.out) == {"model": "mine/model", "tasks": {"lines": {"acc": 0.5, "acc,first": 1.0}}}
    assert (seen["task_manager"].include_path, seen["task_manager"].include_defaults) == ("tasks", False)
    assert call("eval", "mine", "--tasks", "tasks").out == "lines: acc 0.5, acc,first 1\n"
    names[:] = ["broken"]
    rule = "must run without an error (KeyError: 'metric'); mend the task"
    assert call("eval", "mine", "--tasks", "tasks").err == f"error: --tasks 'tasks': {rule}\n"
    names.clear()
    rule = "must define tasks, each with a key 'task'; add one"
    assert call("eval", "mine", "--tasks", "tasks").err == f"error: --tasks 'tasks': {rule}\n"
    rule = "must be a folder with YAML files of tasks; check the path"
    assert call("eval", "mine", "--tasks", "mine").err == f"error: --tasks 'mine': {rule}\n"


@pytest.mark.slow
def test_tasks_run_offline(call: Call) -> None:
    pytest.importorskip("lm_eval", reason="the extra eval is not installed: pip install sparseloco[eval]")
    Path("tasks").mkdir()
    Path("tasks/lines.jsonl").write_text("".join(json.dumps({"text": text(range(n, n + 3))}) + "\n" for n in range(4)))
    Path("tasks/lines.yaml").write_text(
        "task: lines\ndataset_path: json\ndataset_kwargs:\n  data_files: {test: tasks/lines.jsonl}\ntest_split: test\n"
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list:\n  - metric: bits_per_byte\n  - metric: word_perplexity\n"
    )
    figures = json.loads(call("eval", "mine", "--tasks", "tasks", "--json").out)
    assert 0 < figures["tasks"]["lines"]["bits_per_byte"] < 10


def located(place: str) -> str:
    return repr(str(Path(place).resolve()))


def test_a_model_by_path_trains_and_goes_on(call: Call) -> None:
    config = Path("mine/model/config.json")
    Path("new.toml").write_text(without_numbers(config=str(config)))
    assert json.loads(call("describe", "new.toml", "--json").out)[0]["parameters"] == sum(
        value.numel() for value in load_model(Path("mine/model")).parameters()
    )
    ended = call("train", "new.toml", "--out", "new", "--json")
    assert ended.code == 0, ended.err
    first = json.loads(ended.out)["held_out_loss"]
    Path("on.toml").write_text(without_numbers(pretrained="new/model"))
    ended = call("train", "on.toml", "--out", "on", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["held_out_loss"] < first
    lines = [json.loads(line) for line in Path("on/metrics.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in Path("new/metrics.jsonl").read_text().splitlines()]
    ends = [row["loss"] for row in before if row["kind"] == "evaluation" and row["split"] == "validation"]
    starts = [row["loss"] for row in lines if row["kind"] == "evaluation"]
    assert starts[0] == ends[-1]


def test_weights_need_the_tokenizer_that_they_came_with(call: Call) -> None:
    Path("other.txt").write_text(text(range(2000)).replace("Line", "Never"))
    Path("on.toml").write_text(without_numbers(pretrained="mine/model"))
    ended = call("train", "on.toml", "--data", "other.txt", "--out", "on")
    assert (ended.code, ended.err) == (
        2,
        f"error: model.pretrained={located('mine/model')}: its tokenizer (300 tokens) must be that of the text, which "
        "is another one (300 tokens on 'other.txt'), or its tokens would mean something else; use the text and data "
        "settings that it was trained with\n",
    )


def test_vocabulary_must_fit(call: Call) -> None:
    model: Any = build_model(
        vocab_size=280, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24, sequence_length=16
    )
    model.save_pretrained("small")
    Path("new.toml").write_text(without_numbers(config="small"))
    ended = call("train", "new.toml", "--out", "new", "--json")
    assert ended.err == (
        "error: vocab_size=280: the model's vocabulary must be the tokenizer's, which has 300 tokens on 'text.txt'; "
        "build the model with vocab_size=300\n"
    )


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        (
            ("config=a", "pretrained=b"),
            "model.config='a': must not stand beside model.pretrained='b'; keep config for new weights, or pretrained "
            "to go on from its own",
        ),
        (
            ("config=a",),
            "model.hidden_size=16: must be left out beside model.config='a', which says it already; change it there",
        ),
    ],
)
def test_keys_that_do_not_go_together(call: Call, setting: tuple[str, ...], error: str) -> None:
    words = [word for name in setting for word in ("--set", f"model.{name}")]
    ended = call("describe", "run.toml", *words)
    assert (ended.code, ended.err) == (2, f"error: {error}\n")


def test_models_that_cannot_be_read(call: Call) -> None:
    def error(**named: str) -> str:
        Path("new.toml").write_text(without_numbers(**named))
        ended = call("describe", "new.toml")
        assert ended.code == 2
        return ended.err

    rule = "must be an existing file or folder, or a name on the Hub; check the path"
    assert error(config="./nowhere") == f"error: model.config='./nowhere': {rule}\n"
    assert error(pretrained="a/b/c") == f"error: model.pretrained='a/b/c': {rule}\n"
    Path("odd.json").write_text('{"model_type": "t5"}')
    assert error(config="odd.json").startswith(
        "error: model.config='odd.json': must be a causal language model that transformers can read without code of "
        "the model's own (ValueError: Unrecognized configuration class"
    )
    Path("own").mkdir()
    Path("own/config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}'
    )
    Path("own/code.py").write_text('raise SystemExit("this code must not run")\n')
    assert error(pretrained="own").startswith(
        "error: model.pretrained='own': must be a causal language model that transformers can read without code of the "
        "model's own (ValueError: "
    )
    settings = json.loads(Path("mine/model/config.json").read_text())
    Path("odd.json").write_text(json.dumps({**settings, "max_position_embeddings": 8}))
    assert error(config="odd.json") == (
        "error: train.sequence_length=16: must be at most 8, the positions of model.config='odd.json'; use 8 or less\n"
    )


def test_weights_must_be_whole(call: Call) -> None:
    settings = json.loads(Path("mine/model/config.json").read_text())
    Path("mine/model/config.json").write_text(json.dumps({**settings, "num_hidden_layers": 2}))
    Path("on.toml").write_text(without_numbers(pretrained="mine/model"))
    ended = call("train", "on.toml", "--out", "on")
    assert ended.err.startswith(
        f"error: model.pretrained={located('mine/model')}: must hold all weights of LlamaForCausalLM, but lacks 9, "
        "for example model.layers.1.input_layernorm.weight; name a model that was saved whole"
    )

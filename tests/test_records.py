"""What is on record: a result is read as it was, a drifted one fails, the sample is another one every day."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import record_files
import record_plugin
import record_sources
import records
from record_codec import call_of, reader, written
from record_files import missing_package, other_versions, read_book, versions, write
from records import Drifted, Mode, Records, key_of, on_record, using

import memcalc


class Event(NamedTuple):
    storage: int
    nbytes: int = 0


@dataclass
class Step:
    peak: int
    events: list[Event]
    sent: Counter[tuple[str, int]]
    log: list[tuple[str, int, tuple[int, ...]]] | None
    sizes: set[int] = field(default_factory=set)
    flops: dict[str, int] = field(default_factory=dict)


STEP = Step(7, [Event(1, 2), Event(1)], Counter({("all_reduce", 4): 2}), [("mm", 3, (1, 2))], {8, 4}, {"forward": 9})
returned: list[Step] = [STEP]
"""What the oracle below returns next; the last one stays."""


@on_record
def stepped(config: dict[str, Any], *, rank: int = 0, **options: Any) -> Step:
    if options.get("missing"):
        import lion_pytorch_that_is_not_there  # noqa: F401  # pyright: ignore
    return returned[-1]


ORACLE = f"{stepped.__module__.removeprefix('tests.')}.stepped"
CALL = '{"config": {"layers": 2}}'


def recorded(folder: Path, step: Step = STEP) -> None:
    """A folder with one call on record."""
    run = Records(Mode.RECORD, folder=folder)
    returned[:] = [step]
    with using(run):
        stepped({"layers": 2})
    write(folder, run.made, whole=True)


# --- results and calls


@pytest.mark.parametrize("step", [STEP, Step(0, [], Counter(), None)])
def test_a_result_is_read_as_it_was(step: Step) -> None:
    read = reader(Step)(json.loads(json.dumps(written(step))))
    assert read == step
    assert [type(one) for one in (read.sent, read.sizes, *read.events)] == [
        Counter,
        set,
        *(type(e) for e in step.events),
    ]


def test_what_a_call_is_known_by() -> None:
    signature = inspect.signature(stepped)
    assert call_of(signature, ({"b": 1, "a": (2, 3)},), {"rank": 0}) == '{"config": {"a": [2, 3], "b": 1}}'
    assert call_of(signature, ({},), {"rank": 1, "how": partial(write, whole=True)}) == (
        '{"config": {}, "options": {"how": ["record_files.write", {"whole": true}]}, "rank": 1}'
    )
    with pytest.raises(TypeError, match="cannot be part of a call"):
        call_of(signature, ({},), {"how": lambda: 0})


def test_an_estimate_is_known_by_its_setup_and_not_by_its_numbers() -> None:
    report = memcalc.estimate({"model_type": "gpt2", "n_layer": 2}, gpus=2, engine="ddp", seq_len=8)
    call = json.loads(call_of(inspect.signature(record_plugin.handed_over), (report,), {}))["own"]
    assert call["fields"] == {"model_type": "gpt2", "n_layer": 2}
    assert call["setup"]["gpus"] == 2
    assert set(call) == {"fields", "setup", "rank"}


# --- modes


def test_a_default_run_takes_what_is_on_record(tmp_path: Path) -> None:
    recorded(tmp_path)
    returned[:] = [Step(0, [], Counter(), None)]
    run = Records(Mode.SAMPLE, folder=tmp_path)
    with using(run):
        assert stepped({"layers": 2}) == stepped({"layers": 2}, rank=0) == STEP
    assert run.ran_live == 0
    assert run.asked == {ORACLE: {key_of(CALL)}}


@pytest.mark.parametrize("run", [(Mode.LIVE, 0.0), (Mode.SAMPLE, 1.0)], ids=["live", "sample"])
def test_a_record_that_has_drifted_fails(run: tuple[Mode, float], tmp_path: Path) -> None:
    recorded(tmp_path)
    with using(Records(run[0], share=run[1], folder=tmp_path)):
        assert stepped({"layers": 2}) == STEP
        returned[:] = [Step(8, STEP.events, STEP.sent, STEP.log, STEP.sizes, STEP.flops)]
        with pytest.raises(Drifted, match=r'is not what is on record .*"peak":7.* was recorded, .*"peak":8'):
            stepped({"layers": 2})


def test_a_run_with_several_processes_runs_each_call_live_once(tmp_path: Path) -> None:
    folder, claims = tmp_path / "records", tmp_path / "claims"
    folder.mkdir()
    claims.mkdir()
    recorded(folder)
    runs = [Records(Mode.LIVE, folder=folder, claims=claims) for _ in range(2)]
    for run in runs:
        with using(run):
            assert stepped({"layers": 2}) == stepped({"layers": 2}) == STEP
    assert [run.ran_live for run in runs] == [1, 0]
    assert runs[0].asked == runs[1].asked == {ORACLE: {key_of(CALL)}}
    with using(runs[1]), pytest.raises(Drifted, match="has no record"):
        stepped({"layers": 3})


def test_a_run_for_drift_repeats_the_calls_of_changed_oracles_and_a_share_of_the_others(tmp_path: Path) -> None:
    recorded(tmp_path)
    runs = [
        Records(Mode.LIVE, share=share, changed=changed, folder=tmp_path)
        for share, changed in ((0.0, frozenset({ORACLE})), (0.0, frozenset[str]()), (1.0, frozenset[str]()))
    ]
    for run in runs:
        with using(run):
            assert stepped({"layers": 2}) == STEP
    assert [run.ran_live for run in runs] == [1, 0, 1]
    assert [run.live for run in runs] == [{ORACLE: {key_of(CALL)}}, {}, {ORACLE: {key_of(CALL)}}]
    with using(runs[1]), pytest.raises(Drifted, match="has no record"):
        stepped({"layers": 3})


def test_a_test_that_watches_its_oracle_runs_it_in_a_live_run(tmp_path: Path) -> None:
    recorded(tmp_path)
    for mode, times in ((Mode.LIVE, 2), (Mode.SAMPLE, 0)):
        run = Records(mode, changed=frozenset(), folder=tmp_path)
        run.always = True
        with using(run):
            assert stepped({"layers": 2}) == stepped({"layers": 2}) == STEP
        assert run.ran_live == times


def test_an_oracle_is_checked_once_all_its_calls_have_run_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_plugin, "FOLDER", tmp_path)
    write(tmp_path, {"one": {"a": "1", "b": "2"}, "other": {"c": "3"}}, whole=False)
    gathered = record_plugin.Gathered()
    gathered.live = {"one": {key_of("a")}, "other": {key_of("c")}, "unknown": {key_of("d")}}
    assert record_plugin.checked(gathered) == ["other"]


def test_the_sources_of_an_oracle_are_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = tmp_path / "tests"
    (tests / "part").mkdir(parents=True)
    monkeypatch.setattr(record_sources, "TESTS", tests)
    files = {
        "part/test_one.py": "from other_oracle import run\nimport memcalc.validate.run\nimport memcalc.units",
        "other_oracle.py": "def run():\n    import deeper",
        "deeper.py": "",
        "unused.py": "",
        "../memcalc/validate/run.py": "",
        "../memcalc/units.py": "",
    }
    before: set[str] = set()
    for name in ("", *files):
        for path, content in files.items():
            (tests / path).parent.mkdir(parents=True, exist_ok=True)
            (tests / path).write_text(content + ("\n# changed" if path == name else ""))
        record_sources._imported.cache_clear()
        digest = record_sources.digest_of("part.test_one.step")
        assert (digest in before) == (name in ("unused.py", "../memcalc/units.py")), name
        before.add(digest)
    record_sources._imported.cache_clear()
    with pytest.raises(LookupError):
        record_sources.digest_of("nowhere.step")


def test_a_call_without_a_record_runs_and_fails_where_all_are_live(tmp_path: Path) -> None:
    returned[:] = [STEP]
    default = Records(Mode.SAMPLE, folder=tmp_path)
    with using(default):
        assert stepped({"layers": 3}) == STEP
    assert default.lacking == {ORACLE}
    with using(Records(Mode.LIVE, folder=tmp_path)), pytest.raises(Drifted, match="has no record: pytest --record"):
        stepped({"layers": 3})


def test_two_results_of_one_call_are_not_written(tmp_path: Path) -> None:
    recorded(tmp_path)
    with using(Records(Mode.RECORD, folder=tmp_path)):
        stepped({"layers": 2})
        returned[:] = [Step(0, [], Counter(), None)]
        with pytest.raises(Drifted, match="two results in one run"):
            stepped({"layers": 2})


def test_an_oracle_in_a_process_of_its_own_just_runs() -> None:
    returned[:] = [STEP]
    with using(None):
        assert stepped({"layers": 5}, rank=object()) is STEP  # type: ignore[arg-type]


def test_the_sample_is_another_one_with_another_seed() -> None:
    names = [f"call {i}" for i in range(10_000)]
    days = [
        {name for name in names if Records(Mode.SAMPLE, seed=day, share=0.01).chosen(name)} for day in ("1", "1", "2")
    ]
    assert days[0] == days[1] != days[2]
    run = Records(Mode.SAMPLE, seed="1", share=0.01)
    assert {name for name in names if run.chosen(name, 10)} > days[0]
    assert all(50 < len(day) < 200 for day in days)


# --- packages


def test_a_call_without_its_package_is_skipped_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(record_files.PACKAGES, "lion_pytorch_that_is_not_there", "oracles")
    with (
        using(Records(Mode.SAMPLE, folder=tmp_path)),
        pytest.raises(pytest.skip.Exception, match=r"needs lion_.*: pip install '\.\[oracles\]', then pytest --live"),
    ):
        stepped({}, missing=True)
    with using(Records(Mode.LIVE, folder=tmp_path)), pytest.raises(ModuleNotFoundError):
        stepped({}, missing=True)


def test_a_package_that_is_there_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_package(ModuleNotFoundError("torch.nothing", name="torch.nothing")) is None
    assert missing_package(ModuleNotFoundError("nothing", name="nothing")) is None
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(memcalc.InputError) as caught:
        from memcalc.validate import deepspeed

        deepspeed.load()
    monkeypatch.setattr(record_files, "versions", dict)
    assert missing_package(caught.value) == "deepspeed"


def test_other_versions_are_said(tmp_path: Path) -> None:
    recorded(tmp_path)
    assert other_versions(tmp_path) == []
    path = tmp_path / "versions.json"
    path.write_text(json.dumps(versions() | {"torch": "1.0"}))
    (line,) = other_versions(tmp_path)
    assert line.startswith("records are of torch 1.0, ") and line.endswith(" is installed")
    said = record_plugin.header(Records(Mode.SAMPLE, seed="today", share=0.01, folder=tmp_path))
    assert said[0].startswith("records: of torch 1.0, ") and said[0].endswith(
        "; 1 % of the calls run live, --sample-seed today"
    )
    assert said[1:] == [line]
    with (
        using(Records(Mode.LIVE, folder=tmp_path)),
        pytest.raises(Drifted, match=r"on record \(records are of torch 1\.0"),
    ):
        returned[:] = [Step(0, [], Counter(), None)]
        stepped({"layers": 2})


# --- files


@pytest.mark.parametrize("size", [10, record_files.LARGE])
def test_files_of_any_size(size: int, tmp_path: Path) -> None:
    calls = {'{"a": "\u2028"}': "1", '{"b": 2}': json.dumps("x" * size)}
    write(tmp_path, {"oracle": calls}, whole=False)
    assert read_book(tmp_path, "oracle") == calls
    write(tmp_path, {"oracle": {'{"b": 2}': "3"}}, whole=False)
    assert read_book(tmp_path, "oracle") == {'{"a": "\u2028"}': "1", '{"b": 2}': "3"}
    write(tmp_path, {"other": {'{"c": 2}': "4"}}, whole=True)
    assert record_files.oracles_of(tmp_path) == ["other"]


def test_what_workers_hand_over_is_put_together() -> None:
    gathered = record_plugin.Gathered()
    for rank, result in ((0, "1"), (1, "2"), (1, "3")):
        own = Records(Mode.RECORD)
        own.asked, own.made, own.ran_live = {"oracle": {str(rank)}}, {"oracle": {str(rank): result}}, 1
        gathered.add(record_plugin.handed_over(own))
    assert gathered.asked == {"oracle": {"0", "1"}}
    assert gathered.made["oracle"]["0"] == "1"
    assert gathered.ran_live == 3
    assert gathered.wrong == ["oracle1 has two results in one run"]


def test_a_record_that_no_test_asks_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path)
    monkeypatch.setattr(record_plugin, "FOLDER", tmp_path)
    gathered = record_plugin.Gathered()
    assert record_plugin.unasked(gathered) == [
        f"{ORACLE}{CALL} is on record and no test asks for it: pytest --record takes it out"
    ]
    gathered.asked = {ORACLE: {key_of(CALL)}}
    assert record_plugin.unasked(gathered) == []


def test_the_process_of_this_test_has_records() -> None:
    assert records.current is not None


WITH_AND_WITHOUT = """
from records import on_record

@on_record
def oracle(number: int) -> int:
    return number

def test_on_paper() -> None:
    pass

def test_against_an_oracle() -> None:
    assert oracle(1) == 1
"""


def run_of_pytest(folder: Path, *options: str) -> str:
    """Return what pytest prints of the tests in a folder."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "record_plugin",
        "-p",
        "no:randomly",
        "--rootdir",
        str(folder),
    ]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*command, *options], cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    ).stdout


def test_a_live_run_can_leave_out_what_has_passed_on_paper(tmp_path: Path) -> None:
    """The oracle has no record, which fails in a live run: so it has run."""
    (tmp_path / "test_both.py").write_text(WITH_AND_WITHOUT)
    ran = [run_of_pytest(tmp_path, *options) for options in ([], ["--live", "--but-paper"], ["--live"])]
    assert "2 passed" in ran[0]
    assert "1 failed, 1 skipped" in ran[1]
    assert "1 failed, 1 passed" in ran[2]


def test_a_run_for_drift_has_a_share_of_the_slow_tests(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text("import pytest\n\n@pytest.mark.slow\ndef test_long() -> None:\n    pass\n")
    assert "1 skipped" in run_of_pytest(tmp_path, "--drift", "0", "-W", "ignore")
    assert "1 passed" in run_of_pytest(tmp_path, "--drift", "25", "-W", "ignore")


def test_shares_of_marked_tests() -> None:
    """All of them in a live run, whatever has changed."""
    assert record_plugin._shared(Records(Mode.SAMPLE)) == ("live", "slow")
    assert record_plugin._shared(Records(Mode.LIVE, changed=frozenset())) == ("slow",)
    assert record_plugin._shared(Records(Mode.LIVE)) == record_plugin._shared(Records(Mode.RECORD)) == ()
    names = [f"test {i}" for i in range(1000)]
    default = Records(Mode.SAMPLE, seed="1", share=0.01)
    drift = Records(Mode.LIVE, seed="1", share=0.1, changed=frozenset())
    of_default, of_drift = (
        {name for name in names if run.chosen(name, record_plugin._times(run))} for run in (default, drift)
    )
    assert of_default < of_drift
    assert 4 < len(of_default) < 20 and 340 < len(of_drift) < 460


def test_a_test_may_ask_for_the_oracles_that_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_sources, "TESTS", tmp_path)
    for name, content in {
        "one_oracle.py": "",
        "other_oracle.py": "",
        "helper.py": "import one_oracle",
        "test_it.py": "from helper import run",
    }.items():
        (tmp_path / name).write_text(content)
    record_sources._module_or_none.cache_clear()
    oracles = ["one_oracle.step", "other_oracle.step", "test_it.own", "gone.step"]
    assert record_sources.run_by(tmp_path / "test_it.py", oracles) == {"one_oracle.step", "test_it.own"}
    record_sources._module_or_none.cache_clear()


def test_a_call_that_a_test_left_out_may_ask_for_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path)
    monkeypatch.setattr(record_plugin, "FOLDER", tmp_path)
    own = Records(Mode.LIVE, changed=frozenset())
    own.left_out = {ORACLE}
    gathered = record_plugin.Gathered()
    gathered.add(record_plugin.handed_over(own))
    assert record_plugin.unasked(gathered) == []


def test_a_test_that_tries_fewer_examples_is_known() -> None:
    for mode, count in ((Mode.SAMPLE, 10), (Mode.LIVE, 30), (Mode.RECORD, 30)):
        with using(Records(mode)):
            assert records.examples(30) == count
            assert records.current is not None
            assert records.current.tries_fewer == (mode is Mode.SAMPLE)

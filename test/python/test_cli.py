# SPDX-License-Identifier: Apache-2.0
"""`sglang-kdtree`: what it finds, and how it ends."""

from __future__ import annotations

import json

import pytest

from sglang_kdtree import cli, vendored

INFO = {"tp_size": "2", "version": "1", "mode": "native", "kernel": "sm_120", "device": "cuda", "kv_cache": "bfloat16"}


def metrics_text(*ranks: dict[str, str]) -> str:
    lines = ["# HELP sglang:kdtree_mla_info x", "# TYPE sglang:kdtree_mla_info gauge"]
    for labels in ranks:
        pairs = ",".join(f'{key}="{value}"' for key, value in labels.items())
        lines.append(f"sglang:kdtree_mla_info{{{pairs}}} 1.0")
    return "\n".join(lines) + "\n"


def rank(number: int, **changes: str) -> dict[str, str]:
    return {**INFO, "tp_rank": str(number), "worker_pid": str(100 + number), **changes}


def failed(found: list[cli.Finding]) -> list[str]:
    return [finding.name for finding in found if finding.ok is False]


def test_a_healthy_server() -> None:
    found = cli.judge(cli.rank_infos(metrics_text(rank(1), rank(0))))
    assert failed(found) == []
    assert {"rank 0": "pid 100", "rank 1": "pid 101"}.items() <= {f.name: f.detail for f in found}.items()


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ([], ["ranks"]),
        ([rank(0)], ["ranks"]),
        ([rank(0), rank(0)], ["ranks"]),
        ([rank(0), rank(1, version="2")], ["version"]),
        ([rank(0), rank(1, mode="validate", kernel="sm_90")], ["mode", "kernel"]),
    ],
)
def test_what_is_wrong_with_a_server(ranks: list[dict[str, str]], names: list[str]) -> None:
    assert failed(cli.judge(cli.rank_infos(metrics_text(*ranks)))) == names


def test_no_server_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--url", "http://127.0.0.1:9", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["name"] == "server"


def test_bad_command_line_ends_with_2() -> None:
    for arguments in ([], ["cure"], ["doctor", "--loud"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2


def test_doctor_finds_this_installation_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = {finding["name"]: finding for finding in report["findings"]}
    assert report["ok"] and names["self-test"]["ok"] and "against the oracle" in names["self-test"]["detail"]


def test_doctor_names_a_broken_tree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise vendored.VendoredTreeError("sglang is stale")

    monkeypatch.setattr(vendored, "check", broken)
    assert cli.main(["doctor"]) == 1
    assert "FAILED  VendoredTreeError: sglang is stale" in capsys.readouterr().out


def test_doctor_finds_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdtree_spec import oracle

    right = cli.attempt("self-test", cli.self_test)
    pack = oracle.pack_tree_mask
    monkeypatch.setattr(oracle, "pack_tree_mask", lambda mask: pack(mask) ^ 4)  # the op sees another tree
    wrong = cli.attempt("self-test", cli.self_test)
    assert right.ok and wrong.ok is False and "relative error" in wrong.detail

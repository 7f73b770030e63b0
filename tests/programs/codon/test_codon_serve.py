"""The service of a model of codons: DNA with measures for proteins, or what is wrong with each of them."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ascendrun.programs.codon.files import save_model
from ascendrun.programs.codon.model import Config, make_model
from ascendrun.programs.codon.optimize import predict_dna_sequence
from ascendrun.programs.codon.serve import MOST_PROTEINS, Service
from ascendrun.programs.codon.train import write_counts
from ascendrun.programs.codon.vocabulary import ORGANISMS, translate
from ascendrun.programs.devices.accelerator import open_accelerator
from ascendrun.programs.errors import InvalidDataError
from tests.programs import asking
from tests.programs.asking import served
from tests.programs.conftest import options_of

ECOLI = "Escherichia coli general"
PROTEIN = "MKTVRQERLKSIVRILERSKEPVSGAQ"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    path = tmp_path_factory.mktemp("model")
    save_model(make_model(Config(**sizes, max_position_embeddings=64, initializer_range=0.5), seed=1), ORGANISMS, path)
    write_counts({ECOLI: [1 + place % 5 for place in range(64)]}, path)
    return path


def service_of(folder: Path, *options: str) -> Service:
    cpu = open_accelerator("cpu", 0)
    here: Any = SimpleNamespace(accelerator=cpu, device=cpu.device)
    given = "--mode=serve", f"--model_path={folder}", "--dtype=float32"
    return Service.of(options_of("codon", *given, *options), here)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[tuple[str, int]]:
    with served(service_of(folder, "--avoid=GGTCTC").on_rank()) as found:
        yield found


def ask(address: tuple[str, int], body: Any, **headers: str) -> tuple[int, Any]:
    return asking.ask(address, "POST", "/optimize", body, headers)


def test_http_replies_what_the_function_returns(address: tuple[str, int], folder: Path) -> None:
    status, found = ask(address, {"protein": PROTEIN, "organism": 51})
    (row,) = found["sequences"]
    expected: Any = predict_dna_sequence(PROTEIN, 51, model=folder, match_protein=True)
    assert (status, row["predicted_dna"], row["organism"]) == (200, expected.predicted_dna, ECOLI)
    assert row["is_best"] and 0 < row["csi"] <= 1 and 0 < row["gc"] < 100

    drawn = {"proteins": [PROTEIN, "MAK"], "organism": ECOLI, "temperature": 0.8, "num_sequences": 2, "seed": 5}
    status, found = ask(address, {**drawn, "avoid": ["GAATTC"], "gc": "30-70/30"})
    assert status == 200 and [row["id"] for row in found["sequences"]] == ["1.1", "1.2", "2.1", "2.2"]
    assert [translate(row["predicted_dna"]) for row in found["sequences"][1:3]] == [PROTEIN + "_", "MAK_"]
    assert ask(address, {**drawn, "avoid": ["GAATTC"], "gc": "30-70/30"}) == (status, found)
    alone = ask(address, {"protein": PROTEIN, "organism": ECOLI, "temperature": 0.8, "seed": 6})[1]["sequences"]
    both = ask(address, drawn)[1]["sequences"]
    assert alone[0]["predicted_dna"] == both[1]["predicted_dna"]


def test_an_impossible_request_has_the_position_of_each_protein(address: tuple[str, int]) -> None:
    body = {"proteins": ["MAK", "MAKWK", "AKKKKK"], "organism": 51, "avoid": ["TGGAA"], "gc": "40-60/12"}
    status, found = ask(address, body)
    assert status == 422
    assert [(each["protein"], each["position"], each["residue"]) for each in found["problems"]] == [
        (2, 5, "K"),
        (3, 1, "A"),
    ]
    assert all(each["is_certain"] and each["message"] in found["error"] for each in found["problems"])


@pytest.mark.parametrize(
    "body, status, found",
    [
        (b"no json", 400, None),
        ({"organism": 51}, 400, None),
        ({"protein": "MK", "proteins": ["MK"]}, 400, None),
        ({"proteins": []}, 400, None),
        ({"protein": 3, "organism": 51}, 400, None),
        (b'{"protein": "MK", "organism": 51, "temperature": NaN}', 400, None),
        (b'{"protein": "MK", "organism": 51, "seed": 1e400}', 400, None),
        ({"protein": "MK", "organism": {"a": [1]}, "avoid": [["A"], None], "seed": "x"}, 400, ["options.value"] * 3),
        ({"protein": "MK", "organism": 51, "temperature": -1, "beam": 3}, 400, ["options.value", "options.unknown"]),
        ({"proteins": ["MK"] * (MOST_PROTEINS + 1), "organism": 51}, 413, None),
        ({"protein": "MK"}, 422, ["codon-organism"]),
        ({"proteins": ["MK", "M1*K"], "organism": "x"}, 422, ["codon-organism", "codon-residues", "codon-inner-stops"]),
        ({"protein": "M" * 62, "organism": 51}, 422, ["codon-long"]),
        ({"protein": "MK", "organism": 51, "avoid": ["ATG"]}, 422, ["codon-no-codon"]),
        ({"protein": "MK", "organism": 51, "gc": "wide", "num_sequences": 2}, 422, ["codon-gc", "codon-several"]),
    ],
)
def test_wrong_requests_have_all_problems(address: tuple[str, int], body: Any, status: int, found: Any) -> None:
    got, reply = ask(address, body)
    assert got == status and reply["error"]
    assert found is None or len(found) == len(reply["problems"])
    assert found is None or status == 400 or [each["code"] for each in reply["problems"]] == found


def test_a_stage_with_options_that_no_request_can_keep_does_not_start(folder: Path) -> None:
    with pytest.raises(InvalidDataError) as error:
        service_of(folder, "--avoid=ATG", "--organism=nobody")
    assert len(str(error.value).splitlines()) == 2


def test_the_stage_serves_with_a_token_and_ends_at_the_stop_signal(launch: Any, folder: Path) -> None:
    options = ["--mode=serve", f"--model_path={folder}", "--port=0", "--organism=51"]
    run = launch("codon", options, name="serve", rank_env={0: {"ASCENDRUN_SERVE_TOKEN": "secret"}})
    line = run.serving()
    address = line["host"], line["port"]
    assert address[0] == "127.0.0.1" and ask(address, {"protein": "MK"})[0] == 401
    assert ask(address, {"protein": "MK"}, Authorization="Bearer secret")[0] == 200
    run.signal(0, signal.SIGTERM)
    run.succeed()

"""A trained classifier in Python, on standard input and behind HTTP."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.api import Classifier
from ascendrun.programs.trajectory.grammars import as_texts
from ascendrun.programs.trajectory.model import Sizes, config_of_sizes, make_model
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.scores import Adjustment
from ascendrun.programs.trajectory.stages.trained import MOST_TRACKS, answer_lines, service_of
from ascendrun.programs.trajectory.store import Trained, put_together, save_trained, save_vote
from ascendrun.programs.trajectory.tokens import SPECIAL
from tests.programs.asking import ask, served
from tests.programs.conftest import REPO, TINY, Run, Server


@pytest.fixture(scope="module")
def trained(fork_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    options = [*TINY, "--num_train_epochs=1", "--grammar=motion"]
    return Run(fork_server, folder, options, 1, {}, ()).succeed().folder / "out" / "best"


@pytest.fixture(scope="module")
def classifier(trained: Path) -> Classifier:
    return Classifier(trained, device="cpu")


def track_text(number: int = 0, **text: Any) -> str:
    made = text or {"grammar": "motion", "resolution": 10}
    return as_texts([generate(number + 1, seed=9)[number]], **made)[0].text()


def points(number: int = 0) -> list[dict[str, Any]]:
    track = generate(number + 1, seed=9)[number]
    return [
        {
            "time": int(track.time[i]),
            "lat": track.lat[i],
            "lon": track.lon[i],
            "sog": track.sog[i],
            "cog": None if track.cog[i] != track.cog[i] else track.cog[i],
        }
        for i in range(len(track))
    ]


def test_one_text_gives_a_class_name_and_a_confidence(classifier):
    """S0-30, S0-B9: real names, not Class_3."""
    said = classifier.predict_single(track_text(), return_probs=True)
    assert said["class_name"] in classifier.class_names and not said["class_name"].startswith("Class_")
    assert f"{said['confidence']:.4f}" and sum(said["probabilities"].values()) == pytest.approx(1, abs=1e-3)
    assert max(said["probabilities"].values()) == said["confidence"]
    assert "probabilities" not in classifier.predict_single(track_text())


def test_a_text_that_names_the_class_is_answered_as_one_that_does_not(classifier):
    """S0-B1: the guide's texts name it at every point; what training never saw must not reach the model either."""
    words = track_text().split()
    plain = " ".join(f"{' '.join(words[i : i + 8])} POINT_END" for i in range(0, len(words), 8))
    named = plain.replace("POINT_END", "Oil_Tanker POINT_END")
    assert classifier.predict_single(named, return_probs=True) == classifier.predict_single(plain, return_probs=True)


def test_a_text_of_another_grammar_is_refused_and_one_with_some_unknown_tokens_says_so(classifier):
    with pytest.raises(InvalidDataError) as caught:
        classifier.predict_single(track_text(grammar="guide", resolution=10))
    refused = caught.value.args[0]
    assert refused.key == "program.unknown-tokens" and refused.values["share"] < 0.1
    words = track_text(**classifier.vote.members[0].text).split()
    said = classifier.predict_single(" ".join([*words, *["NEVER"] * (len(words) // 3)]))
    assert 0.5 < said["known_tokens"] < 0.9
    assert "known_tokens" not in classifier.predict_single(" ".join(words))


def test_a_track_in_waters_that_training_has_not_seen_is_marked(classifier):
    assert "known_waters" not in classifier.predict_track(points())
    elsewhere = [{**point, "lat": point["lat"] - 60} for point in points()]
    assert classifier.predict_track(elsewhere)["known_waters"] is False


def test_a_reply_is_computed_in_the_precision_that_was_asked_for(trained, classifier):
    seen = []
    low = Classifier(trained, device="cpu", dtype="bfloat16")
    for each in (classifier, low):
        with each.vote.members[0].model.head.register_forward_hook(lambda *given: seen.append(given[2].dtype)):
            each.predict_single(track_text())
    assert seen == [torch.float32, torch.bfloat16]


def test_the_adjustment_that_an_evaluation_chose_is_in_every_answer(trained, tmp_path):
    save_vote([trained], temperature=0.3, prior_shift=0.5, folder=tmp_path)
    adjusted = Classifier(tmp_path, device="cpu")
    usual = Classifier(trained / "model.pt", device="cpu")  # without the temperature of its training
    each = [said.predict_single(track_text(), return_probs=True)["probabilities"] for said in (usual, adjusted)]
    plain = np.array([list(each[0].values())])
    wanted = Adjustment(0.3, 0.5).apply(plain, adjusted.vote.members[0].priors)[0]
    assert wanted.max() > 1.2 * plain.max()
    assert list(each[1].values()) == pytest.approx(wanted.tolist(), abs=3e-3)
    assert put_together(adjusted.vote, [plain, plain])[0].tolist() == pytest.approx(wanted.tolist())


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_transformers_loads_a_classifier_of_the_last_token_and_computes_the_same(tmp_path, kind):
    """S0-B7: the published classifier was saved in a form that nothing loads."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

    text = {"grammar": "guide", "resolution": 10}  # its texts have no summary, which transformers could not use
    words = sorted({word for number in range(6) for word in track_text(number, **text).split()})
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    config = config_of_sizes(words=len(vocabulary), hidden=32, layers=2, heads=2, max_length=256)
    sizes = Sizes({**config, "model_type": kind}, 3, 0.1, "last", "causal")
    model = make_model(sizes, seed=1)
    torch.nn.init.normal_(model.head.weight)
    save_trained(Trained(model, sizes, vocabulary, ["Tanker", "Tug", "Ferry"], text, [0.3, 0.3, 0.4]), tmp_path)
    ours = Classifier(tmp_path, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "transformers")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "transformers").eval()
    texts = [track_text(number, **text) for number in range(4)]
    with torch.no_grad():
        given = tokenizer(texts, padding=True, return_tensors="pt")
        found = torch.softmax(theirs(given["input_ids"], attention_mask=given["attention_mask"]).logits, -1)
    for row, said in zip(found.tolist(), ours.predict_batch(texts, return_probs=True)):
        assert list(said["probabilities"].values()) == pytest.approx(row, abs=1e-4)
    assert theirs.config.id2label == {0: "Tanker", 1: "Tug", 2: "Ferry"}
    answers = pipeline("text-classification", model=str(tmp_path / "transformers"), device="cpu")(texts)
    assert [answer["label"] for answer in answers] == [said["class_name"] for said in ours.predict_batch(texts)]


def test_texts_and_points_of_a_track_are_answered_alike_alone_and_in_a_batch(classifier):
    texts = [track_text(i, **classifier.vote.members[0].text) for i in range(5)]
    together = classifier.predict_batch(texts, return_probs=True)
    for i, said in enumerate(together):
        alone = classifier.predict_single(texts[i], return_probs=True)
        assert alone["probabilities"] == pytest.approx(said["probabilities"], abs=2e-4)
        by_points = classifier.predict_track(points(i), return_probs=True)
        assert by_points["probabilities"] == pytest.approx(said["probabilities"], abs=1e-3)


def test_every_line_of_a_stream_is_answered_in_order_bad_ones_too(classifier):
    asked = [{"id": 1, "text": track_text()}, {"id": 2, "points": points(1)}, {"nothing": 0}]
    lines = io.StringIO("".join(json.dumps(each) + "\n" for each in asked) + "no json\n" + json.dumps(asked[0]))
    out = io.StringIO()
    answer_lines(classifier, lines, out, with_all=False)
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line.get("id") for line in said] == [1, 2, None, None, 1]
    assert said[0]["class_name"] and '"points"' in said[2]["error"] and "error" in said[3]


@pytest.mark.parametrize(
    "line",
    [
        '{"points": {"a": 1}}',
        '{"points": [1]}',
        '{"points": [{"time": 1, "lat": 1' + "0" * 400 + ', "lon": 1}]}',
        '{"points": [{"time": 1' + "0" * 400 + ', "lat": 1, "lon": 1, "sog": 1, "cog": 1}]}',
        "[" * 100_000,
    ],
)
def test_nothing_that_a_line_holds_ends_the_stream(classifier, line):
    out = io.StringIO()
    answer_lines(classifier, io.StringIO(line + "\n" + json.dumps({"text": track_text()})), out, with_all=False)
    bad, good = (json.loads(said) for said in out.getvalue().splitlines())
    assert bad["error"] and good["class_name"]


@pytest.fixture
def stream(trained: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that answers lines; who asks has had two answers."""
    argv = [
        sys.executable,
        "-m",
        "ascendrun.programs.trajectory",
        "--mode=predict",
        "--data_path=-",
        f"--model_path={trained}",
        "--device=cpu",
    ]
    environ = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environ,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for number in range(2):
            process.stdin.write(json.dumps({"id": number, "text": track_text(number)}) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == number
        yield process
        process.kill()


def test_the_stream_answers_a_line_while_the_sender_waits_for_it(stream):
    stream.stdin.write(json.dumps({"id": 2, "text": track_text()}))
    stream.stdin.close()
    assert json.loads(stream.stdout.readline())["id"] == 2, "the last line needs no end"
    assert stream.wait(60) == 0


def test_a_stream_that_waits_for_a_line_ends_when_it_is_asked_to(stream):
    stream.stdin.write('{"id": 2, "text": "half a')
    stream.stdin.flush()
    stream.send_signal(signal.SIGTERM)
    assert stream.wait(30) == 0 and stream.stdout.read() == "", "half a line is no question"


@pytest.fixture(scope="module")
def address(classifier: Classifier) -> Iterator[tuple[str, int]]:
    with served(service_of(classifier)) as found:
        yield found


def test_http_says_what_python_says(classifier, address):
    status, said = ask(address, "POST", "/predict", {"text": track_text(), "probabilities": True})
    assert status == 200 and said == classifier.predict_single(track_text(), return_probs=True)
    status, said = ask(address, "POST", "/predict", {"tracks": [points(0), points(1)]})
    assert status == 200 and [row["class_name"] for row in said["predictions"]] == [
        classifier.predict_track(points(i))["class_name"] for i in range(2)
    ]
    status, said = ask(address, "GET", "/health")
    assert status == 200 and said["status"] == "ok" and said["classes"] == classifier.class_names


@pytest.mark.parametrize(
    "body, status",
    [
        (b"no json", 400),
        (b"[]", 400),
        ({"text": "a", "texts": []}, 400),
        ({"texts": []}, 400),
        ({"text": "SPD_SLOW", "probability": True}, 400),
        ({"text": ""}, 422),
        ({"text": "SPD_SLOW CRS_N POINT_END"}, 422),
        ({"points": [{"time": 1}]}, 422),
        ({"points": []}, 422),
        ({"points": 3}, 422),
        ({"points": {"a": 1}}, 422),
        (b"[" * 100_000, 400),
        ({"texts": ["a"] * (MOST_TRACKS + 1)}, 413),
    ],
)
def test_wrong_requests_are_answered_with_what_is_wrong(address, body, status):
    got, said = ask(address, "POST", "/predict", body)
    assert got == status and said["error"]
    assert ask(address, "GET", "/health")[0] == 200


def test_a_port_that_is_taken_and_a_host_that_is_none_are_told_with_a_way_out(start, trained):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option, words in ((f"--port={port}", "Address already in use"), ("--host=no.such.invalid", "choose")):
            run = start("--mode=serve", f"--model_path={trained}", option, name=option.strip("-"))
            assert run.wait() == [1]
            assert words in run.text() and "choose another port" in run.text() and "Traceback" not in run.text()


def test_the_serve_stage_listens_on_loopback_and_ends_well_when_it_is_asked_to(start, trained):
    run = start("--mode=serve", f"--model_path={trained}", "--port=0", "--inference_warmup_steps=1", name="serve")
    line = run.serving()
    assert line["host"] == "127.0.0.1"
    assert ask((line["host"], line["port"]), "POST", "/predict", {"text": track_text()})[0] == 200
    run.signal(0, signal.SIGTERM)
    run.succeed()

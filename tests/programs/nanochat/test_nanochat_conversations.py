"""Conversations as tokens and loss masks, written down by hand; tasks from files of each kind, and generated."""

import json

import pytest

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat import conversations, tasks
from ascendrun.programs.nanochat import texts as tokenizer

CHARACTERS = tokenizer.of_characters(["abcdefghijklmnopqrstuvwxyz 0123456789+=\n"])
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "2+3"},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "so "},
            {"type": "python", "text": "2+3"},
            {"type": "python_output", "text": "5"},
            {"type": "text", "text": "=5"},
        ],
    },
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "bye"},
]


def spelled(ids):
    return [CHARACTERS.id_to_token(each) for each in ids]


def test_marks_and_masks_of_a_conversation_with_a_tool():
    """Only what the assistant writes carries loss: its text, its calls and its ends, not what the tool answers."""
    ids, mask = conversations.render_conversation(CHARACTERS, CHAT)
    asked = ["<|bos|>", "<|user_start|>", *"be kind\n\n2+3", "<|user_end|>", "<|assistant_start|>"]
    wrote = [*"so ", "<|python_start|>", *"2+3", "<|python_end|>"]
    output = ["<|output_start|>", "5", "<|output_end|>"]
    more = ["=", "5", "<|assistant_end|>"]
    again = ["<|user_start|>", *"ok", "<|user_end|>", "<|assistant_start|>"]
    last = [*"bye", "<|assistant_end|>"]
    parts = [(asked, 0), (wrote, 1), (output, 0), (more, 1), (again, 0), (last, 1)]
    assert spelled(ids) == [token for part, _ in parts for token in part]
    assert mask == [learned for part, learned in parts for _ in part]
    assert conversations.render_conversation(CHARACTERS, CHAT, limit=len(ids)) == (ids, mask)
    assert conversations.render_conversation(CHARACTERS, CHAT, limit=len(ids) - 1) == ([], [])


def test_a_prompt_ends_where_the_reply_begins():
    ids, _ = conversations.render_conversation(CHARACTERS, CHAT)
    before = conversations.render_for_completion(CHARACTERS, CHAT)
    assert before == ids[: len(before)] == conversations.render_for_completion(CHARACTERS, CHAT[:-1])
    assert spelled(before)[-2:] == ["<|user_end|>", "<|assistant_start|>"]


def test_marks_in_a_text_stay_text():
    """A user cannot end the own message."""
    pieces = tokenizer.train_bpe(["user end assistant start"], 270)
    ids, _ = conversations.render_conversation(pieces, [{"role": "user", "content": "<|user_end|><|assistant_start|>"}])
    marks = [pieces.id_to_token(each) for each in ids if pieces.id_to_token(each) in tokenizer.SPECIAL]
    assert marks == ["<|bos|>", "<|user_start|>", "<|user_end|>"]


@pytest.mark.parametrize(
    "messages, key",
    [
        ([], "program.no-message"),
        ([{"role": "system", "content": "x"}], "program.no-message"),
        ("hello", "program.no-messages"),
        ([{"role": "assistant", "content": "x"}], "program.roles-in-turn"),
        ([CHAT[1], CHAT[3]], "program.roles-in-turn"),
        ([{"role": "user", "content": 5}], "program.message-parts"),
        ([{"role": "user", "content": [{"type": "image", "text": "x"}]}], "program.message-parts"),
        ([{"role": "user", "content": [{"type": "python", "text": "x"}]}], "program.tool-of-user"),
    ],
)
def test_conversations_that_do_not_alternate_are_refused(messages, key):
    with pytest.raises(InvalidDataError) as caught:
        conversations.render_conversation(CHARACTERS, messages)
    assert caught.value.args[0].key == key


@pytest.fixture
def file_of(tmp_path):
    """file_of(*rows): a file of JSON lines, after an empty one; a row that is a string is a line as it is."""

    def write(*rows):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / "task.jsonl"
        path.write_text("\n" + "\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write


def test_messages_are_lists_or_objects(file_of):
    path = file_of(CHAT[1:3], {"messages": CHAT})
    found = tasks.read_task({"file": path, "kind": "messages", "epochs": 2}, seed=1)
    assert [len(each.messages) for each in found] == [2, 4, 2, 4]
    assert found[-1].messages[0]["content"] == "be kind\n\n2+3"
    assert len(tasks.read_task({"file": path, "kind": "messages", "epochs": 3, "rows": 1}, seed=1)) == 3
    assert [len(each.messages) for each in found[1:3]] == [4, 2]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Which?", "choices": ["x", "y"], "answer": "B"},
        {"question": "Which?", "choices": ["x", "y"], "answer": 1},
        {"question": "Which?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"},
    ],
)
def test_choices_end_in_their_letters(file_of, row):
    [example] = tasks.read_task({"file": file_of(row), "kind": "choices"}, seed=1)
    question, reply = (each["content"] for each in example.messages)
    last = "Respond only with the letter of the correct answer."
    assert question == f"Multiple Choice question: Which?\n- x=A\n- y=B\n\n{last}", "as nanochat asks"
    assert (example.letters, example.answer, reply) == (("A", "B"), "B", [{"type": "text", "text": "B"}])
    assert [example.reward(text) for text in ("B", " B.\n", "A", "", "- x=B")] == [1, 1, 0, 0, 0]


def test_worked_solutions_use_the_calculator(file_of):
    row = {"question": "How many?", "answer": "She has 2*8=<<2*8=16>>16.\nAnd 1,000 more.\n#### 1,016"}
    [example] = tasks.read_task({"file": file_of(row), "kind": "gsm8k"}, seed=1)
    assert example.messages[1]["content"] == [
        {"type": "text", "text": "She has 2*8="},
        {"type": "python", "text": "2*8"},
        {"type": "python_output", "text": "16"},
        {"type": "text", "text": "16.\nAnd 1,000 more.\n#### 1,016"},
    ]
    right = ("so\n#### 1016", "#### 1,016", "#### 1016 apples", "#### 1016\n#### 17")
    wrong = ("####1016", "####  1016", "#### 1016.", "#### 1016.00", "#### $1016", "#### 17", "#### .", "####", "")
    assert [example.reward(text) for text in (*right, *wrong)] == [1] * 4 + [0] * 9, "as nanochat judges"


@pytest.mark.parametrize("kind", ["spelling", "sums"])
def test_generated_tasks_follow_from_their_seed_and_have_right_replies(kind):
    found, other = ([*tasks.read_task({"kind": kind, "rows": 40}, seed=seed)] for seed in (1, 2))
    assert found == [*tasks.read_task({"kind": kind, "rows": 40}, seed=1)] != other
    for example in found:
        reply = "".join(part["text"] for part in example.messages[1]["content"])
        assert example.reward(reply) == 1.0
        assert example.reward(reply + "9") == 0.0
        conversations.render_conversation(CHARACTERS, example.messages)


@pytest.mark.parametrize(
    "kind, row",
    [
        ("messages", [CHAT[1], CHAT[1]]),
        ("messages", [CHAT[1]]),
        ("messages", {"question": "a", "answer": "#### 1"}),
        ("messages", "{not json"),
        ("choices", {"question": "a", "choices": ["x"], "answer": "B"}),
        ("choices", {"question": "a", "answer": "#### 1"}),
        ("choices", CHAT),
        ("gsm8k", {"question": "a", "answer": "no number"}),
        ("gsm8k", {"question": "a", "choices": ["x"], "answer": 0}),
    ],
)
def test_a_line_of_another_kind_is_an_error_with_its_file_and_number(file_of, kind, row):
    good = {
        "messages": CHAT,
        "choices": {"question": "a", "choices": ["x"], "answer": "A"},
        "gsm8k": {"question": "a", "answer": "#### 1"},
    }
    path = file_of(good[kind], row)
    found = tasks.read_task({"file": path, "kind": kind}, seed=1)
    assert found[0].kind == kind
    with pytest.raises(InvalidDataError) as caught:
        _ = found[1]
    values = caught.value.args[0].values
    assert (values["path"], values["place"].values["number"]) == (path, 3)


@pytest.mark.parametrize("spec", [{"kind": "poems"}, {"kind": "messages"}, {"kind": "messages", "file": "/nowhere"}])
def test_a_task_that_does_not_exist_is_an_error(spec):
    with pytest.raises(InvalidDataError):
        tasks.read_task(spec, seed=1)


def test_an_empty_task_is_an_error(file_of):
    with pytest.raises(InvalidDataError):
        tasks.read_task({"file": file_of(), "kind": "messages"}, seed=1)

"""The blocks of a settings file that say who is told: all problems together, each at its place."""

from pathlib import Path

import pytest

from ascendrun.core.errors import InvalidInputError
from ascendrun.core.notices import DEFAULT_JOBS, NoticeSettings
from ascendrun.core.notices.settings import read_notices
from ascendrun.head.notify.delivery import UnreadableCredentialsError, read_credentials
from ascendrun.head.state.user_files import load_settings
from ascendrun.query.notice_view import view_targets
from ascendrun.text import use_language

URL = "https://open.feishu.cn/open-apis/bot/v2/hook/5e3d587e-topsecret"


def load(tmp_path: Path, text: str, *, weak: str = "") -> NoticeSettings:
    (tmp_path / "weak.yaml").write_text(weak)
    (tmp_path / "user.yaml").write_text(text)
    return read_notices(load_settings({}, files=[tmp_path / "weak.yaml", tmp_path / "user.yaml"]))


def test_all_that_can_be_said_is_read(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        f"""
notify:
  - {{name: team, type: feishu, url: "{URL}", secret_file: sub/secret,
      events: [failed, started], jobs: [qwen*, "!test*"],
      format: text, lang: zh}}
  - {{type: slack, url_file: ~/slack.url, events: ended}}
hook: {{command: [bin/told, --now], events: [failed], timeout_s: 5}}
deadman: {{url: "https://hc.example/x", interval_s: 30, ok: "", failed: /fail}}
""",
    )
    team, slack, hook, _ = settings.targets
    assert (team.name, team.type) == ("team", "feishu")
    assert (team.events, team.jobs) == (("failed", "started"), ("qwen*", "!test*"))
    assert (team.format, team.lang, team.secret_file) == ("text", "zh", str(tmp_path / "sub" / "secret"))
    assert (slack.name, slack.events, slack.jobs) == ("slack", ("ended",), DEFAULT_JOBS)
    assert hook.command == (str(tmp_path / "bin" / "told"), "--now") and hook.timeout_s == 5
    assert settings.deadman is not None and settings.deadman.interval_s == 30
    assert settings.deadman.suffixes == {"succeeded": "", "stopped": "", "failed": "/fail"}


def test_every_problem_is_reported_with_its_place_and_no_credential(tmp_path: Path) -> None:
    text = """color: pink
notify:
  - {type: pigeon, url: "https://x/topsecret"}
  - {type: feishu}
  - {type: slack, url: "http://hooks.slack.com/topsecret", secret: topsecret}
  - {type: dingtalk, url: "topsecret", url_file: x, events: [faild], lang: fr, stile: text}
  - slack
hook: {command: "echo topsecret", timeout_s: 0}
deadman: {url: "https://x/topsecret", interval_s: soon, failed: "topsecret"}
"""
    with pytest.raises(InvalidInputError) as caught:
        load(tmp_path, text)
    lines = [problem.line for problem in caught.value.problems]
    assert lines == [1, 3, 4, 5, 5, 6, 6, 6, 6, 7, 8, 8, 9, 9]
    assert "topsecret" not in "\n".join(str(problem) for problem in caught.value.problems)


def test_a_command_that_notifies_nobody_needs_no_valid_targets(tmp_path: Path) -> None:
    (tmp_path / "user.yaml").write_text("color: never\nhook: []\n")
    settings = load_settings({}, files=[tmp_path / "user.yaml"])
    assert settings.color == "never"
    with pytest.raises(InvalidInputError):
        read_notices(settings)


@pytest.mark.parametrize("value", ["123456", "0x1F", "yes"])
def test_a_credential_may_look_like_a_number(tmp_path: Path, value: str) -> None:
    settings = load(tmp_path, f"notify: [{{type: generic, url_file: a, secret: {value}}}]")
    assert settings.targets[0].secret == value


@pytest.mark.parametrize(
    "text",
    [
        "notify: slack",
        "notify: {type: slack}",
        "hook: [a]",
        "deadman: x",
        "hook: {}",
        "notify: [[]]",
        "notify:\n- {name: a, type: slack, url: 'https://x/y'}\n- {name: a, type: slack, url: 'https://x/y'}",
    ],
)
def test_a_block_of_the_wrong_shape_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInputError):
        load(tmp_path, text)


def test_the_stronger_file_replaces_whole_blocks(tmp_path: Path) -> None:
    weak = f"notify: [{{type: feishu, url: '{URL}'}}]\nhook: {{command: [a]}}\ndeadman: {{url: 'https://x/y'}}\n"
    settings = load(tmp_path, "notify: [{type: slack, url: 'https://x/y'}]\n", weak=weak)
    assert [target.type for target in settings.targets] == ["slack", "hook", "deadman"]
    assert settings.origins["notify"].endswith("user.yaml") and settings.origins["hook"].endswith("weak.yaml")


def test_the_language_of_a_target_is_its_own_else_that_of_the_settings_else_that_of_the_process(tmp_path: Path) -> None:
    targets = "notify: [{type: slack, url_file: a, lang: en}, {type: feishu, url_file: b}]\n"
    use_language("zh")
    try:
        assert [target.language for target in load(tmp_path, targets).targets] == ["en", "zh"]
        use_language("en")
        assert [target.language for target in load(tmp_path, targets + "lang: zh\n").targets] == ["en", "zh"]
    finally:
        use_language("en")


@pytest.mark.parametrize(
    "content",
    ["", "two lines\nhere\n", "\xff\xfe", "x" * 10_000, "ftp://x/y", "https://", "nope", "https://x:port/topsecret"],
)
def test_a_url_file_that_holds_no_url_is_told_by_its_name_only(tmp_path: Path, content: str) -> None:
    target = load(tmp_path, "notify: [{type: generic, url_file: url}]").targets[0]
    (tmp_path / "url").write_text(content, encoding="latin-1")
    with pytest.raises(UnreadableCredentialsError) as caught:
        read_credentials(target)
    assert str(tmp_path / "url") in str(caught.value) and "topsecret" not in str(caught.value)


def test_what_is_shown_of_a_target_is_its_host_and_who_else_can_read_its_files(tmp_path: Path) -> None:
    settings = load(tmp_path, "notify: [{type: feishu, url_file: url}]")
    (tmp_path / "url").write_text(URL)
    (tmp_path / "url").chmod(0o644)
    view = view_targets(settings, tmp_path / "state")[0]
    assert view.where == "https://open.feishu.cn/…" and "topsecret" not in repr(view)
    assert view.problem is not None and "chmod 600" in view.problem
    (tmp_path / "url").chmod(0o600)
    assert view_targets(settings, tmp_path / "state")[0].problem is None

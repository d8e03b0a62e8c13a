import pytest

from cluster.chat_messages import continue_last, flatten_messages
from cluster.errors import InvalidRequest


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_b027_text_parts_are_joined_in_order_for_every_role(role):
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert flatten_messages([{"role": role, "content": parts}]) == [{"role": role, "content": "A\nB"}]


def test_absent_content_is_empty_and_absent_keys_are_left_out():
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call], "name": None}]
    assert flatten_messages(messages) == [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert flatten_messages([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]


def test_the_request_is_not_changed():
    messages = [{"role": "assistant", "content": "a", "name": None}]
    continue_last(flatten_messages(messages), False)
    assert messages == [{"role": "assistant", "content": "a", "name": None}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0]"),
        ([{"role": "user", "content": "a"}, {"role": 3, "content": "b"}], "messages[1]"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text", "text": "a"}}], "messages[0].content"),
    ],
)
def test_b027_what_is_not_text_is_refused_by_name(messages, param):
    with pytest.raises(InvalidRequest) as caught:
        flatten_messages(messages)
    assert caught.value.param == param


def test_the_marker_occurs_nowhere_else():
    _, first = continue_last([{"role": "assistant", "content": "x"}], False)
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": "x"}]
    marked, second = continue_last(messages, False)
    assert second != first
    assert marked[-1]["content"] == "x" + second

import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.errors import InvalidRequest, ModelError
from cluster.tokenizer import Tokenizer
from tests.support.byte_tokenizer import (
    BOS,
    CHATML,
    CHATML_WITH_BOS,
    EOS,
    IM_END,
    IM_START,
    THINK,
    VOCAB_SIZE,
    write_byte_tokenizer,
)
from tests.support.sentencepiece_tokenizer import (
    FIRST_BYTE,
    FIRST_PIECE,
    PIECES,
    write_sentencepiece_tokenizer,
)

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "é漢字 😀",
    "\u0000",
    "<|eos|>x<|bos|>",
    "a<think>b",
    "\n\n",
]


@pytest.fixture
def plain(tmp_path):
    return Tokenizer.load(write_byte_tokenizer(tmp_path / "plain"))


def edit(directory: Path, file_name: str, **changes):
    path = directory / file_name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


# ---- text and ids --------------------------------------------------------------------------------


def test_a_long_text_does_not_stop_other_threads(plain):
    """The middle one of three: the machine itself holds up one now and then."""
    text = "word and 漢字 " * 60_000

    def longest_stop():
        """Of a thread that looks at the clock, as a share of the time that the text takes."""
        times, done = [time.monotonic()], threading.Event()

        def tick():
            while not done.wait(0.005):
                times.append(time.monotonic())

        ticker = threading.Thread(target=tick)
        ticker.start()
        ids = plain.encode(text)
        took_s = time.monotonic() - times[0]
        done.set()
        ticker.join()
        assert bytes(ids) == text.encode()
        return max(after - before for before, after in itertools.pairwise(times)) / took_s

    assert statistics.median(longest_stop() for _ in range(3)) < 0.5


def test_a_long_text_has_the_ids_of_its_parts(tmp_path):
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, add_bos=True))
    text = "é <|eos|>" * 1000
    assert tokenizer.encode(text) == [BOS, *tokenizer.encode("é <|eos|>", False) * 1000]
    assert tokenizer.encode("<|bos|>" + text) == tokenizer.encode(text)
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode(text + "\ud800")


@pytest.mark.parametrize("add_bos", [False, True])
def test_encoding_is_that_of_transformers(tmp_path, add_bos):
    directory = write_byte_tokenizer(tmp_path, add_bos=add_bos)
    ours, theirs = Tokenizer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)


def test_sentencepiece_encoding_is_that_of_transformers(tmp_path):
    directory = write_sentencepiece_tokenizer(tmp_path)
    ours, theirs = Tokenizer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.bos_token_id == 1
    assert ours.eos_token_ids == (2,)


def test_b012_an_empty_prompt_is_no_ids_or_just_bos(tmp_path, plain):
    with_bos = Tokenizer.load(write_byte_tokenizer(tmp_path / "bos", add_bos=True))
    assert plain.encode("") == []
    assert with_bos.encode("") == [BOS]
    assert with_bos.encode("", add_special_tokens=False) == []


def test_b040_a_text_that_begins_with_bos_gets_no_second_one(tmp_path):
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, add_bos=True))
    assert tokenizer.encode("hi") == [BOS, *b"hi"]
    assert tokenizer.encode("<|bos|>hi") == [BOS, *b"hi"]
    assert tokenizer.encode("<|bos|><|bos|>hi") == [BOS, BOS, *b"hi"]  # the client's own doing


def test_a_lone_surrogate_is_refused(plain):
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        plain.encode("a\ud83d", param="prompt")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        plain.render_chat([{"role": "user", "content": "\ud83d"}])
    assert caught.value.param == "messages"


def test_b004_token_bytes_join_to_the_text(plain):
    text = "ď 漢字 👩‍👩‍👧"
    ids = plain.encode(text)
    assert b"".join(plain.token_bytes(token_id) for token_id in ids) == text.encode()
    assert plain.token_bytes(THINK) == b"<think>"
    assert plain.token_bytes(IM_END) == b"<|im_end|>"
    assert plain.token_bytes(VOCAB_SIZE + 5) == b""


def test_b004_token_bytes_of_sentencepiece(tmp_path):
    tokenizer = Tokenizer.load(write_sentencepiece_tokenizer(tmp_path))
    assert tokenizer.token_bytes(FIRST_BYTE + 0xE6) == b"\xe6"
    assert tokenizer.token_bytes(FIRST_PIECE + PIECES.index("▁Hello")) == b" Hello"
    assert tokenizer.token_bytes(FIRST_PIECE + PIECES.index("▁漢")) == " 漢".encode()
    assert tokenizer.token_bytes(FIRST_PIECE + PIECES.index("<0x41>x")) == b"<0x41>x"


def test_bad_words_at_the_start_and_after_a_space(plain, tmp_path):
    assert plain.bad_words_ids(["ab", " ab", "c", ""]) == ((*b"ab",), (*b"c",))
    pieces = json.loads((write_byte_tokenizer(tmp_path) / "tokenizer.json").read_text())
    pieces["model"]["vocab"] |= {"Ġa": 261}
    pieces["model"]["merges"] = [["Ġ", "a"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(pieces))
    assert Tokenizer.load(tmp_path).bad_words_ids(["a"]) == ((ord("a"),), (261,))


# ---- special tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation_eos", "expected"),
    [
        (None, (EOS,)),
        (EOS, (EOS,)),
        (IM_END, (EOS, IM_END)),
        ([IM_END, EOS, 7], (7, EOS, IM_END)),
        ([], (EOS,)),
    ],
)
def test_b044_eos_ids_are_those_of_both_files(tmp_path, generation_eos, expected):
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, eos_ids=generation_eos))
    assert tokenizer.eos_token_ids == expected


def test_special_and_added_tokens(plain):
    assert [token_id for token_id in range(VOCAB_SIZE + 9) if plain.is_special(token_id)] == [
        BOS,
        EOS,
        IM_START,
        IM_END,
    ]
    assert plain.vocab_size == VOCAB_SIZE
    assert plain.bos_token_id == BOS


def test_tokens_only_the_config_knows_are_added_as_transformers_does(tmp_path):
    directory = edit(
        write_byte_tokenizer(tmp_path),
        "tokenizer_config.json",
        eos_token={"__type": "AddedToken", "content": "<|end|>", "special": True, "normalized": False},
        added_tokens_decoder={
            "261": {"content": "<tool>", "special": False, "lstrip": True},
            "262": {"content": "<|mark|>", "special": True},
        },
        extra_special_tokens=["<|x|>"],
    )
    ours, theirs = Tokenizer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    text = "a  <tool><|mark|><|x|><|end|>z"
    assert ours.encode(text) == theirs.encode(text)
    for skip in (True, False):
        assert ours.decode(ours.encode(text), skip) == theirs.decode(
            ours.encode(text), skip_special_tokens=skip
        )
    assert ours.eos_token_ids == tuple(sorted({EOS, theirs.eos_token_id}))
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize(
    ("file_name", "content", "reason"),
    [
        ("tokenizer.json", None, "missing"),
        ("tokenizer.json", "{", "cannot read"),
        ("tokenizer.json", "{}", "cannot read"),
        ("tokenizer_config.json", "{", "cannot read"),
        ("generation_config.json", "[]", "not a JSON object"),
    ],
)
def test_a_broken_directory_is_one_clear_error(tmp_path, file_name, content, reason):
    path = write_byte_tokenizer(tmp_path) / file_name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelError, match=reason) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_decoder_of_another_kind_is_refused_at_once(tmp_path, decoder):
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer.load(edit(write_byte_tokenizer(tmp_path), "tokenizer.json", decoder=decoder))


# ---- chat ----------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": " hé "}]
TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_BOS, TRIMMING])
@pytest.mark.parametrize("add_bos", [True, False])
def test_b040_chat_ids_are_those_of_transformers_with_at_most_the_templates_bos(
    tmp_path, add_generation_prompt, template, add_bos
):
    directory = write_byte_tokenizer(tmp_path, add_bos=add_bos, chat_template=template)
    ours, theirs = Tokenizer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    ids = ours.render_chat(CHAT, add_generation_prompt)
    assert ids == theirs.apply_chat_template(
        CHAT, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert ids.count(BOS) == (template == CHATML_WITH_BOS)


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@pytest.mark.parametrize("text", ["OK!", "OK! ", "OK!\n", "", "  \n", "S", "<|im_end|>", "user"])
def test_b042_a_continued_message_ends_exactly_with_its_text(tmp_path, template, text):
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, chat_template=template))
    head = tokenizer.render_chat_text(CHAT, add_generation_prompt=True)
    messages = [*CHAT, {"role": "assistant", "content": text}]
    shown = text.lstrip() if template == TRIMMING else text
    rendered = tokenizer.render_chat_text(messages, False, True)
    assert rendered == head + shown
    assert tokenizer.render_chat(messages, False, True) == tokenizer.encode(rendered, False)


def test_b042_a_continued_list_of_parts(plain):
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B "}]
    text = plain.render_chat_text([*CHAT, {"role": "assistant", "content": parts}], False, True)
    assert text.endswith("assistant\nA\nB ")


@pytest.mark.parametrize(
    ("messages", "flags", "param"),
    [
        (CHAT, (True, True), "continue_final_message"),
        (CHAT, (False, True), "continue_final_message"),  # the last message is the user's
        ([*CHAT, {"role": "assistant", "content": "a"}], (True, True), "continue_final_message"),
        ([], (True, False), "messages"),
    ],
)
def test_b042_flags_that_do_not_fit(plain, messages, flags, param):
    with pytest.raises(InvalidRequest) as caught:
        plain.render_chat(messages, *flags)
    assert caught.value.param == param


def test_b042_a_template_that_hides_the_last_message(tmp_path):
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, chat_template="{{ messages[0].content }}"))
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.render_chat([*CHAT, {"role": "assistant", "content": "a"}], False, True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{{ messages[0].role + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses_is_the_clients_error(tmp_path, template):
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, chat_template=template))
    tokenizer.warm_up()
    with pytest.raises(InvalidRequest, match="chat template refuses") as caught:
        tokenizer.render_chat(CHAT)
    assert caught.value.param == "messages"


def test_template_options_are_those_of_a_list(tmp_path):
    template = "{{ messages[0].content }}{{ enable_thinking }}"
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, chat_template=template))
    assert tokenizer.render_chat_text(CHAT, enable_thinking=False) == "SFalse"
    for name in ("messages", "tokenize", "bos_token"):
        with pytest.raises((InvalidRequest, TypeError)) as caught:
            tokenizer.render_chat(CHAT, **{name: "x"})
        assert getattr(caught.value, "param", "chat_template_kwargs") == "chat_template_kwargs"


def test_a_template_that_does_not_compile_ends_the_start(tmp_path):
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, chat_template="{% for %}"))
    with pytest.raises(ModelError, match="does not compile"):
        tokenizer.warm_up()


def test_where_the_template_is(tmp_path):
    directory = write_byte_tokenizer(tmp_path, chat_template=None)
    tokenizer = Tokenizer.load(directory)
    tokenizer.warm_up()
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat(CHAT)
    several = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    edit(directory, "tokenizer_config.json", chat_template=several)
    assert Tokenizer.load(directory).render_chat_text(CHAT) == "D"
    (directory / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(directory).render_chat_text(CHAT) == "J"


def test_neither_loading_nor_rendering_loads_torch(tmp_path):
    write_byte_tokenizer(tmp_path)
    program = (
        "import sys; from pathlib import Path; from cluster.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.load(Path(sys.argv[1]))\n"
        "print('transformers' in sys.modules)\n"
        "tokenizer.warm_up(); tokenizer.render_chat([{'role': 'user', 'content': 'x'}])\n"
        "print('torch' in sys.modules)\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["False", "False"]

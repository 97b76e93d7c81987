import itertools
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from specdraft.config import UserError
from specdraft.data.chat import (
    AnswerRow,
    Example,
    answers_to_examples,
    check_masks,
    encode_conversation,
    encode_conversations,
    first_turn,
    follow_up,
    read_answers,
    read_examples,
    render_prompt,
    tokenizer_hash,
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: reasoning is a field or inline, and stripped from all turns before the last question.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set content = m['content'] %}{% if m['role'] == 'assistant' %}"
    "{% set reasoning = m['reasoning_content'] or '' %}{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}{{ content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As DeepSeek-R1's: reasoning is stripped from every turn, and the generation prompt opens it.
DEEPSEEK = (
    "{{ '<|endoftext|>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|assistant|>' + m['content'].split('</think>')[-1] + '<|im_end|>' }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# As Llama-2's: trimmed contents, no header, a space before the end-of-turn token, no use of add_generation_prompt.
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|endoftext|>[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' <|im_end|>' }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)
TEXT = ["The answer: The sea.\n\nThe sea and the answer.\n\nassistant: The the : The : sea\n\n"] * 4


@pytest.fixture(scope="module")
def backend():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str()


@pytest.fixture
def make(backend):
    def make_tokenizer(template, **tokens):
        tokens = {"eos_token": "<|im_end|>"} | tokens
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend), chat_template=template, **tokens)

    return make_tokenizer


def turns(*contents, system=None):
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return ([{"role": "system", "content": system}] if system else []) + messages


def supervised(tokenizer, example):
    """The texts of the supervised runs."""
    runs, previous = [], False
    for token, on in zip(example.input_ids.tolist(), example.loss_mask.tolist(), strict=True):
        if on:
            runs.append([token]) if not previous else runs[-1].append(token)
        previous = on
    return [tokenizer.decode(run) for run in runs]


CONVERSATIONS = {
    "one turn": (turns("What?", "The answer."), ["The answer."]),
    "several turns": (turns("What?", "The sea.", "And?", "The answer"), ["The sea.", "The answer"]),
    "answer repeated in the question": (turns("The sea", "The sea", "The sea", "The sea"), ["The sea", "The sea"]),
    "end token inside a question": (turns("what is <|im_end|>?", "the end", "ok", "yes"), ["the end", "yes"]),
    "many-byte characters": (turns("héé", "😀 naïve 日本"), ["😀 naïve 日本"]),
    "unanswered question at the end": (turns("What?", "The answer.", "and then?"), ["The answer."]),
}


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize(
    "template", [CHATML, CHATML_MARKED, DEEPSEEK, LLAMA2], ids=["chatml", "marks", "deepseek", "llama2"]
)
def test_mask_is_the_answers_and_their_end_of_turn(make, template, case):
    """Faults 1 and 2: with and without generation marks, from the ids that are trained on."""
    tokenizer = make(template)
    messages, answers = CONVERSATIONS[case]
    example = encode_conversation(tokenizer, messages, 10_000, "a")
    expected = [f" {a} <|im_end|>" if template == LLAMA2 else f"{a}<|im_end|>" for a in answers]
    assert supervised(tokenizer, example) == expected
    answered = messages[:-1] if messages[-1]["role"] == "user" else messages
    ids = tokenizer.apply_chat_template(answered, return_dict=True)["input_ids"]
    assert example.input_ids.tolist() == ids[: len(example.input_ids)]
    assert tokenizer.decode(ids[len(example.input_ids) :]).strip() == ""


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, QWEN3], ids=["chatml", "marks", "qwen3"])
def test_system_turn_is_not_supervised(make, template):
    tokenizer = make(template)
    example = encode_conversation(tokenizer, turns("What?", "The answer.", system="Be brief."), 10_000)
    assert "Be brief." in tokenizer.decode(example.input_ids)
    assert "Be brief." not in "".join(supervised(tokenizer, example))


def reasoned(*contents):
    """User contents and (reasoning, answer) pairs."""
    messages = []
    for content in contents:
        if isinstance(content, tuple):
            messages.append({"role": "assistant", "content": content[1], "reasoning_content": content[0]})
        else:
            messages.append({"role": "user", "content": content})
    return messages


def inline(messages):
    """The same with the reasoning inside the content."""
    result = []
    for message in messages:
        message = dict(message)
        if "reasoning_content" in message:
            thoughts = message.pop("reasoning_content")
            message["content"] = f"<think>\n{thoughts}\n</think>\n\n{message['content']}"
        result.append(message)
    return result


@pytest.mark.parametrize("form", [reasoned, lambda *c: inline(reasoned(*c))], ids=["field", "inline"])
@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK], ids=["qwen3", "deepseek"])
def test_reasoning_of_the_last_turn_is_supervised(make, template, form):
    """Fault 3. The answer's text occurs in the reasoning too. History is as the template shows it when generating."""
    tokenizer = make(template)
    messages = form("What?", ("2 and 2", "4"), "And then?", ("so 5, The answer is 5", "5"))
    example = encode_conversation(tokenizer, messages, 10_000)
    opening = "" if template == DEEPSEEK else "<think>\n"  # DeepSeek's generation prompt has it
    first, last = supervised(tokenizer, example)
    assert first.strip() == "4<|im_end|>"
    assert last == opening + "so 5, The answer is 5\n</think>\n\n5<|im_end|>"
    prompt = render_prompt(tokenizer, messages[:-1])
    assert example.input_ids[: len(prompt)].tolist() == prompt
    assert not example.loss_mask[len(prompt) - 1]
    assert example.loss_mask[len(prompt) :].all()


def test_reasoning_is_kept_where_the_template_does_not_know_it(make):
    """Fault 3."""
    tokenizer = make(CHATML)
    example = encode_conversation(tokenizer, reasoned("What?", ("2 and 2", "4")), 10_000)
    assert supervised(tokenizer, example) == ["<think>\n2 and 2\n</think>\n\n4<|im_end|>"]
    same = encode_conversation(tokenizer, inline(reasoned("What?", ("2 and 2", "4"))), 10_000)
    assert torch.equal(example.input_ids, same.input_ids)
    assert torch.equal(example.loss_mask, same.loss_mask)


def test_marks_that_leave_reasoning_out_are_not_followed(make):
    """Fault 3."""
    marked = QWEN3.replace(
        "{{ content + '<|im_end|>\n' }}", "{% generation %}{{ content }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    )
    assert marked != QWEN3
    messages = reasoned("What?", ("2 and 2", "4"), "And?", ("so 5", "5"))
    example, expected = (encode_conversation(make(template), messages, 10_000) for template in (marked, QWEN3))
    assert torch.equal(example.input_ids, expected.input_ids)
    assert torch.equal(example.loss_mask, expected.loss_mask)
    without = turns("What?", "4")  # nothing left out: the marks hold, and the empty reasoning is not in them
    assert supervised(make(marked), encode_conversation(make(marked), without, 10_000)) == ["4<|im_end|>"]


SPACED = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)


def test_merge_across_the_start_of_an_answer(make):
    """Fault 2: ' The' holds the prompt's last space. It is never drafted, since the prompt fixes its first character,
    so it is not supervised."""
    tokenizer = make(SPACED)
    messages = turns("What", "The sea")
    example = encode_conversation(tokenizer, messages, 10_000)
    tokens = [tokenizer.decode(i) for i in example.input_ids.tolist()]
    first = example.loss_mask.tolist().index(True)
    assert tokens[first - 1] == " The"
    assert supervised(tokenizer, example) == [" sea"]
    assert [tokenizer.decode(i) for i in render_prompt(tokenizer, messages[:1])][-2:] == [":", " "]


def test_merge_across_the_end_of_an_answer(make):
    """Fault 2: the answer's last token also holds the template's line end; the model wrote its beginning."""
    tokenizer = make("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}")
    example = encode_conversation(tokenizer, turns("What", "sea", "And", "sea\n"), 10_000)
    assert tokenizer.decode(example.input_ids[-1]) == "\n\n"
    assert supervised(tokenizer, example) == ["sea", "sea\n\n"]


def test_mask_of_marks_equals_mask_without(make):
    messages = turns("What?", "The sea.", "And?", "  The answer\n", system="Be brief")
    marked, searched = (encode_conversation(make(t), messages, 10_000) for t in (CHATML_MARKED, CHATML))
    assert torch.equal(marked.input_ids, searched.input_ids)
    assert torch.equal(marked.loss_mask, searched.loss_mask)


@pytest.mark.parametrize("bos", [None, "<|endoftext|>"])
def test_plain_text_without_a_template(make, bos):
    tokenizer = make(None)
    if bos:
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="<|im_end|>")
    example = encode_conversation(tokenizer, turns("What?", "The sea.", "And?", "The answer"), 10_000)
    assert supervised(tokenizer, example) == ["The sea.", "The answer<|im_end|>"]
    prompt = render_prompt(tokenizer, turns("What?"))
    assert tokenizer.decode(prompt) == (bos or "") + "What?\n\n"
    first = example.loss_mask.tolist().index(True)
    assert tokenizer.decode(example.input_ids[:first]) == tokenizer.decode(prompt)
    assert len(prompt) == first - 1  # Fault 2: the line ends are one token, or two before text; a counted prefix is off


@pytest.mark.parametrize("template", [CHATML, LLAMA2, DEEPSEEK], ids=["chatml", "llama2", "deepseek"])
def test_follow_up_continues_a_finished_conversation(make, template):
    tokenizer = make(template)
    whole = tokenizer.apply_chat_template(turns("What?", "The sea.", "And?"), add_generation_prompt=True)["input_ids"]
    before = encode_conversation(tokenizer, turns("What?", "The sea."), 10_000).input_ids.tolist()
    assert before + follow_up(tokenizer, "And?") == whole


def test_truncation_keeps_the_first_tokens(make):
    tokenizer = make(CHATML)
    messages = turns("What?", "The sea and the answer.")
    whole = encode_conversation(tokenizer, messages, 10_000)
    first = whole.loss_mask.tolist().index(True)
    cut = encode_conversation(tokenizer, messages, first + 2)
    assert torch.equal(cut.input_ids, whole.input_ids[: first + 2])
    assert int(cut.loss_mask.sum()) == 2
    with pytest.raises(UserError, match=f"prompt alone fills max_length={first}"):
        encode_conversation(tokenizer, messages, first)


def test_every_row_is_accounted_for(make):
    """Fault 4: a bad row neither kills the run nor disappears."""
    good = turns("What?", "The sea.")
    rows = [
        good,
        turns("What?"),
        turns("What?", "The sea.", system="Be brief"),  # the template raises
        [{"role": "user", "content": ["an image"]}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Sea", "thinking": True}],
        "no messages",
        turns("What? " * 200, "The sea."),
        turns("And?", "The answer."),
    ]
    examples, account = encode_conversations(make(LLAMA2), ((str(i), row) for i, row in enumerate(rows)), 100)
    assert [example.id for example in examples] == ["0", "7"]
    assert account.kept == 2
    assert account.total == len(rows)
    assert account.skipped == {
        "no assistant turn": 1,
        "chat template: only user and assistant roles": 1,
        "every message needs a role and a content, both text": 1,
        "a message's reasoning must be text": 1,
        "messages must be a list of objects with role and content": 1,
        "prompt alone fills max_length=100": 1,
    }
    assert "2 of 8 rows kept, skipped: 1 x" in str(account)


def test_template_that_drops_answers_is_refused_with_counts_and_a_row(make):
    """Fault 1."""
    template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match=r"0 of 2 rows kept, skipped: 2 x .*drops or repeats.*The first row.*What\?"):
        encode_conversations(make(template), [("a", turns("What?", "Sea")), ("b", turns("What?", "Sea"))], 100)


def test_marks_around_nothing_are_refused(make):
    """Fault 1: the template has marks, but not around the answers."""
    template = CHATML + "{% generation %}{% endgeneration %}"
    with pytest.raises(UserError, match="no assistant tokens"):
        encode_conversation(make(template), turns("What?", "Sea"), 100)


def test_check_masks(make):
    """Fault 1: refused with counts and one rendered example."""
    tokenizer = make(CHATML)
    good = encode_conversation(tokenizer, turns("What?", "Sea"), 100, "good")
    check_masks([good], tokenizer)
    empty = Example("bad", good.input_ids, torch.zeros_like(good.loss_mask))
    with pytest.raises(UserError, match=r"(?s)1 of 2 examples .* tokens are supervised.*'bad' begins .*What\?"):
        check_masks([good, empty], tokenizer)
    with pytest.raises(UserError, match="got 0 examples"):
        check_masks([], tokenizer)


# ----------------------------------------------------------------------------------------------- answers.jsonl

ROW = {
    "id": "p1",
    "category": "chat",
    "input_ids": [1, 5, 6, 7, 2, 5, 8, 2],
    "spans": [[2, 5], [6, 8]],
    "finished": [True, True],
}


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_answers_round_trip(tmp_path):
    (row,) = read_answers(write(tmp_path / "answers.jsonl", ROW))
    assert row.to_json() == json.dumps(ROW)
    example = row.example()
    assert example.input_ids.tolist() == ROW["input_ids"]
    assert example.loss_mask.tolist() == [False, False, True, True, True, False, True, True]
    assert row.example(max_length=4).loss_mask.tolist() == [False, False, True, True]


def test_read_examples_takes_answers_and_conversations(make, tmp_path):
    tokenizer = make(CHATML)
    answers, account = read_examples(write(tmp_path / "answers.jsonl", ROW), tokenizer, 100)
    assert [example.id for example in answers] == ["p1"]
    rows = [
        {"id": "a", "messages": turns("What?", "The sea")},
        {"messages": turns("What?")},
        {"messages": turns("A", "B")},
    ]
    examples, account = read_examples(write(tmp_path / "chats.jsonl", *rows), tokenizer, 100)
    assert [example.id for example in examples] == ["a", "chats-3"]
    assert account.skipped == {"no assistant turn": 1}
    with pytest.raises(UserError, match=r"chats.jsonl line 2: got \[1\]"):
        read_examples(write(tmp_path / "chats.jsonl", rows[0], [1]), tokenizer, 100)
    with pytest.raises(UserError, match="no such file"):
        read_examples(tmp_path / "missing.jsonl", tokenizer, 100)
    with pytest.raises(UserError, match="got no rows"):
        read_examples(write(tmp_path / "empty.jsonl"), tokenizer, 100)


def test_answer_row_from_example_and_back(make):
    tokenizer = make(CHATML)
    example = encode_conversation(tokenizer, turns("What?", "The sea.", "And?", "The answer"), 10_000, "a")
    row = AnswerRow.from_example(example, "chat", [tokenizer.eos_token_id])
    assert row.finished == [True, True]
    assert torch.equal(row.example().loss_mask, example.loss_mask)
    assert torch.equal(row.example().input_ids, example.input_ids)
    cut = AnswerRow.from_example(row.example(len(example.input_ids) - 1), "chat", [tokenizer.eos_token_id])
    assert cut.finished == [True, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"id": "p2", "inp', "line 2: not JSON"),
        ({"id": "p2"}, r"line 2: got \['id'\]"),
        ([1], "line 2: got list"),
        (ROW | {"input_ids": []}, "input_ids"),
        (ROW | {"input_ids": "text"}, "input_ids"),
        (ROW | {"input_ids": [1, -5, 6]}, "input_ids"),
        (ROW | {"finished": [True]}, "one length"),
        (ROW | {"spans": [[6, 8], [2, 5]]}, "ascending"),
        (ROW | {"spans": [[2, 5], [6]]}, "ascending"),
        (ROW | {"spans": [[2, 5], [6, 9]]}, "leave the 8 tokens"),
        (ROW, "ids occur more than once"),
    ],
)
def test_bad_answers_are_refused_with_their_line(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        read_answers(write(tmp_path / "answers.jsonl", ROW, row))


def test_bytes_that_are_not_utf8_are_refused_with_their_line(make, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"messages": "caf\xe9"}\n')
    for read in (read_answers, lambda path: read_examples(path, make(CHATML), 99)):
        with pytest.raises(UserError, match=r"a\.jsonl line 2: got bytes that are not UTF-8"):
            read(tmp_path / "a.jsonl")


def test_missing_or_empty_answers_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_answers(tmp_path / "answers.jsonl")
    with pytest.raises(UserError, match="got no rows"):
        read_answers(write(tmp_path / "answers.jsonl"))


def test_answers_without_supervised_tokens_are_counted():
    """Fault 4."""
    rows = [
        AnswerRow("a", "chat", [1, 2, 3, 4], [[2, 4]], [True]),
        AnswerRow("b", "chat", [1, 2, 3, 4], [[3, 4]], [True]),
        AnswerRow("c", "chat", [1, 2, 3, 4], [[4, 4]], [False]),
    ]
    examples, account = answers_to_examples(rows, max_length=3)
    assert [example.id for example in examples] == ["a"]
    assert account.skipped == {"prompt alone fills max_length=3": 1, "empty answer": 1}


def test_tokenizer_hash_sees_template_and_vocabulary_only(make):
    """Fault 5."""
    reference = tokenizer_hash(make(CHATML))
    assert tokenizer_hash(make(CHATML)) == reference
    assert tokenizer_hash(make(QWEN3)) != reference
    assert tokenizer_hash(make(CHATML, eos_token="<|endoftext|>")) != reference
    larger = make(CHATML)
    larger.add_tokens(["<new>"])
    assert tokenizer_hash(larger) != reference
    padded = make(CHATML, pad_token="<|im_end|>")
    padded(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(padded) == tokenizer_hash(make(CHATML, pad_token="<|im_end|>"))


@pytest.mark.parametrize("call", ["strftime_now('%d %b %Y')", 'strftime_now( "%d %b %Y" )'])
def test_a_template_that_prints_the_date_gives_the_same_ids_tomorrow(make, call):
    """Answers are known by their prompt's ids: a run that passes midnight must not lose them."""
    tokenizer = make("{% set today = " + call + " %}{{ today + '\\n' }}" + CHATML)
    assert tokenizer.decode(render_prompt(tokenizer, turns("What?"))).startswith("01 Jan 2026\n")


def test_a_system_turn_that_the_template_refuses_stands_before_the_user_turn(make):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    assert first_turn(make(refusing), "the sea", "What?") == turns("the sea\n\nWhat?")
    assert first_turn(make(CHATML), "the sea", "What?") == turns("What?", system="the sea")
    assert first_turn(make(refusing), None, "What?") == turns("What?")


def test_several_templates_and_no_default_are_refused(make):
    with pytest.raises(UserError, match="chat template: "):
        render_prompt(make({"one": CHATML, "other": CHATML}), turns("What?"))

"""Spelling: letters one by one, however they are set apart."""

import pytest

from ttrl.errors import TaskError
from ttrl.tasks.spelling import SpellingGrader, get_spelling_tasks


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("p-l-u-m", 1.0),
        ("P-L-U-M", 1.0),
        ("p l u m", 1.0),
        ("p, l, u, m", 1.0),
        ("p.l.u.m.", 1.0),
        ("P - L - U - M", 1.0),
        ("p – l – u – m", 1.0),
        ("p‐l‒u―m", 1.0),
        ("\u200bp-\u200bl-u-m\ufeff", 1.0),
        ("**p-l-u-m**", 1.0),
        ("`p-l-u-m`", 1.0),
        ("```\np-l-u-m\n```", 1.0),
        ("plum: p-l-u-m", 1.0),
        ("Gern!\np-l-u-m", 1.0),
        ('"p" "l" "u" "m"', 1.0),
        ("p/l/u/m", 1.0),
        ("p_l_u_m", 1.0),
        ("p-l-u-m!", 1.0),
        ("p → l → u → m", 1.0),
        ("[p, l, u, m]", 1.0),
        ("p+l+u+m", 1.0),
        ("(p) (l) (u) (m)", 1.0),
        ("p-l-u-m (plum)", 0.0),
        ("p-1-u-m", 0.0),
        ("1. p 2. l 3. u 4. m", 0.0),
        ("  p-l-u-m \n\n", 1.0),
        ("<answer>p-l-u-m</answer> Bye.", 1.0),
        ("<think>p-l-o</think>p-l-u-m", 1.0),
        ("p-l-o-m\np-l-u-m", 1.0),
        ("-p-l-u-m-", 1.0),
        ("x" * 100_000 + "\np-l-u-m", 1.0),
        ("plum", 0.0),
        ("p-lum", 0.0),
        ("p-l-u-m\nplum", 0.0),
        ("p-l-u-m\nThat is it.", 0.0),
        ("p-l-u-m-s", 0.4),
        ("p-l-u", 0.375),
        ("p-l-o-m", 0.375),
        ("m-u-l-p", 0.0),
        ("p-l-u-m p-l-u-m", 0.25),
        ("p1l2u3m4", 0.0),
        ("1-2-3-4", 0.0),
        ("<answer></answer> p-l-u-m", 0.0),
        ("<think>p-l-u-m", 0.0),
        ("", 0.0),
        (None, 0.0),
        ("п-л-у-м", 0.0),
        ("ｐ-ｌ-ｕ-ｍ", 0.0),
        ("p-" * 50_000, 0.0),
        ("p\nl\nu\nm", 0.0),
        ("pee-el-you-em", 0.0),
    ],
)
def test_grader(reply, content, reward):
    got, metrics = SpellingGrader("plum", partial_credit=1.0)(reply(content))
    assert (got, metrics) == (pytest.approx(reward), {"exact": float(reward == 1.0)})
    assert SpellingGrader("plum")(reply(content))[0] == float(reward == 1.0)


def test_letters_with_accents(reply, tmp_path):
    assert SpellingGrader("thé")(reply("t-h-e\u0301"))[0] == 1.0
    assert SpellingGrader("thé")(reply("t-h-e"))[0] == 0.0
    (tmp_path / "words.txt").write_text("\n".join(f"cafe\u0301{chr(97 + i)}" for i in range(26)))
    (task,) = get_spelling_tasks(n=1, path=tmp_path / "words.txt")
    assert task.grader(reply(task.grader.reference()))[0] == 1.0


def test_long_replies(grade_long_replies):
    grade_long_replies(SpellingGrader("plum", 1.0), "p-", ":", "p l u m\n")


def test_tasks(reply, tmp_path):
    train, validation = get_spelling_tasks("train", 500), get_spelling_tasks("validation", 300)
    assert not {t.id for t in train} & {t.id for t in validation}
    assert len({t.id for t in validation}) == 300
    assert [t.id for t in get_spelling_tasks("validation", 9, seed=5)] == [
        t.id for t in validation[:9]
    ]
    assert [t.id for t in get_spelling_tasks("train", 9, seed=5)] != [t.id for t in train[:9]]
    for task in train + validation:
        assert task.grader(reply("-".join(task.grader.word)))[0] == 1.0
        assert task.messages[0]["content"].startswith(f"Spell {task.grader.word},")
    path = tmp_path / "words.txt"
    path.write_text(
        "\n".join(
            [*(f"wort{c}{d}" for c in "abcdefghij" for d in "abcdefghij"), "ab3", "", "Wortaa"]
        ),
        encoding="utf-8",
    )
    words = {
        t.grader.word
        for split in ("train", "validation")
        for t in get_spelling_tasks(split, 5, path=path)
    }
    assert all(len(word) == 6 and word.startswith("wort") for word in words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "test"}, "spelling has"),
        ({"n": 0}, "n is 0"),
        ({"min_length": 5, "max_length": 4}, "min_length 5"),
        ({"partial_credit": 2}, "partial_credit is 2"),
        ({"split": "validation", "n": 10**6}, "there are .* words of 3 to 12 letters"),
        ({"path": "/no/such/file"}, "cannot be read"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(TaskError, match=words):
        get_spelling_tasks(**changes)


def test_published_words(shared, reply):
    path = shared / "words"
    (file,) = path.glob("*.txt")
    tasks = get_spelling_tasks("validation", 1000, path=file, max_length=15)
    assert all(task.grader(reply(task.grader.reference()))[0] == 1.0 for task in tasks)

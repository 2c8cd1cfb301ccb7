"""Which candidates say the same thing: small worlds, each of which would go wrong by a rule less."""

from collections.abc import Sequence

import pytest

from app import supersession
from app.supersession import Said, asked_terms, groups, identifiers, newest_first

YEAR = 365 * 86_400_000


def said(query: str, year: int | None, title: str, text: str = "", *, evergreen: bool = False) -> Said:
    whole = f"{title} {text}".lower()
    held = frozenset(
        term
        for term in (*asked_terms(query), *identifiers(query))
        if term in whole.replace("licences", "licence")
    )
    return Said(None if year is None else (year - 1970) * YEAR, title, text, held, evergreen)


def members(
    query: str, *candidates: tuple[int | None, str, str], current: bool = False
) -> list[tuple[int, ...]]:
    given = [said(query, *each) for each in candidates]
    return [group.members for group in groups(query, given, current=current)]


FILLER = [
    (2010, f"{word} handbook", f"all about the {word}")
    for word in ("garden", "kitchen", "harbour", "tower", "bridge")
]
BODY = "It tells at length, and in words that no other page here has, what is to be done and by whom, where and when it is."


def test_titles_that_say_the_same_are_one_thing() -> None:
    found = members(
        "simple mail transfer protocol",
        (1982, "Simple Mail Transfer Protocol", ""),
        (2008, "The Simple Mail Transfer Protocol", ""),
        (2001, "Internet Printing Guide", ""),
        *FILLER,
    )
    assert found == [(0, 1)]


def test_both_hold_all_that_is_asked() -> None:
    query = "address translation terminology"
    titles = [
        (1994, "Address Translation: Terminology", ""),
        (2001, "Terminology of Traditional Address Translation", ""),
    ]
    assert members(query, *titles, *FILLER) == [(0, 1)]
    assert members("terminology of routing", *titles, (1999, "Address Plans", ""), *FILLER) in ([], [(0, 1)])


def test_what_names_less_of_what_is_asked_is_about_something_else() -> None:
    query = "participation in the summer programme"
    old = (2024, "Participation in the Summer Programme 2024", BODY)
    new = (2025, "Results of the Summer Programme 2025", f"after our participation {BODY}")
    again = (2025, "Participation in the Summer Programme 2025", BODY)
    assert members(query, old, new, *FILLER) == []
    assert members(query, old, again, *FILLER) == [(0, 1)]


def test_a_number_of_the_query_tells_them_apart() -> None:
    old, new = (2019, "Report 2019 on licences", BODY), (2021, "Report 2021 on licences", BODY)
    assert members("report on licences", old, new, *FILLER) == [(0, 1)]
    assert members("report on licences 2019", old, new, *FILLER) == []


RULES = "register at the front desk{} and are accompanied at all times."
GUIDE = "打开应用，输入手机号和验证码即可登录。忘记密码请联系管理员。"


@pytest.mark.parametrize(
    "query, older, newer, plainly",
    [
        (
            "What are the visitor rules of the Hangzhou office?",
            ("Hangzhou office visitor rules", f"Visitors {RULES.format('')}"),
            ("Shanghai office visitor rules", f"Visitors {RULES.format(' with an ID')}"),
            "visitor rules of the office",
        ),
        (
            "杭州办公室访客怎么登记",
            ("杭州办公室访客须知", "访客须在前台登记，领取访客证，由接待人员陪同进入办公区。"),
            ("上海办公室访客须知", "访客须在前台登记并出示身份证，领取访客证，由接待人员陪同进入办公区。"),
            "办公室访客怎么登记",
        ),
        (
            "安卓客户端怎么登录",
            ("安卓客户端登录说明", GUIDE),
            ("苹果客户端登录说明", GUIDE),
            "客户端怎么登录",
        ),
    ],
)
@pytest.mark.parametrize("current", [False, True])
def test_a_word_of_the_query_that_names_the_older_alone_tells_them_apart(
    query: str, older: tuple[str, str], newer: tuple[str, str], plainly: str, current: bool
) -> None:
    pair = ((2023, *older), (2025, *newer))
    assert members(query, *pair, *FILLER, current=current) == []
    assert members(plainly, *pair, *FILLER, current=current) == [(0, 1)]
    # Who asks for the newer one by name has it; and a text that says the word is about it too.
    whole = (2025, newer[0], f"{newer[1]} {older[0]}")
    assert members(query, pair[0], whole, *FILLER, current=current) == [(0, 1)]


@pytest.mark.parametrize(
    "query, older, newer, text",
    [
        # A bare title may put a thing otherwise.
        ("content type for reports of the mail system", "Content Type for Reports of the Mail System",
         "Media Type for Reports of the Mail System", "Media Type for Reports of the Mail System."),
        # Written apart or joined; across the border of two words in another order.
        ("e-mail rules of conduct", "E-mail rules of conduct, retention and privacy for members of staff",
         "Email rules of conduct, retention and privacy for members of staff", BODY),
        ("email rules of conduct", "Email rules of conduct, retention and privacy for members of staff",
         "E-mail rules of conduct, retention and privacy for members of staff", BODY),
        ("差旅报销政策", "公司员工国内差旅报销政策说明", "公司员工国内差旅政策与报销说明", "先填写申请，领导批准之后交给财务办理。"),
    ],
)  # fmt: skip
def test_other_spellings_and_bare_titles_are_no_other_thing(
    query: str, older: str, newer: str, text: str
) -> None:
    pair = ((2019, older, text), (2024, newer, text))
    assert members(query, *pair, *FILLER) == [(0, 1)]


def test_a_number_within_a_word_is_named_too() -> None:
    query = "POP3 support"
    held = frozenset(("pop3", "support"))
    mail = [
        Said(30 * YEAR, "POP3 Support for Mail", "", held),
        Said(40 * YEAR, "Protocol Version 3 (POP3) Support for Mail", "", held | {"3"}),
        Said(20 * YEAR, "Printer Support of Version 4", "", frozenset(("support",))),
    ]
    assert [group.members for group in groups(query, mail)] == [(0, 1)]


def test_the_newer_must_tell_what_is_asked() -> None:
    query = "repair of the queue that loses messages"
    old = (2019, "Release 1.0 notes", f"repair of the queue that loses messages {BODY}")
    new = (2021, "Release 1.1 notes", BODY)
    assert members(query, old, new, *FILLER) == []
    assert members(query, old, (2021, "Release 1.1 notes", old[2]), *FILLER) == [(0, 1)]


def test_an_erratum_is_not_the_article() -> None:
    title = "perturbations of the eigenvalues of normal matrices"
    article = (1975, title, f"eigenvalues of matrices: {BODY}")
    assert (
        members("eigenvalues of matrices", article, (1976, f"{title} erratum", "eigenvalues"), *FILLER) == []
    )
    assert members("eigenvalues of matrices", article, (1976, f"{title} revised", article[2]), *FILLER) == [
        (0, 1)
    ]


def test_names_of_few_telling_words_count_by_all_of_them() -> None:
    films = [(2013, "Now You See Me", BODY), (2022, "See for Me", BODY)]
    assert members("now you see me", *films, *FILLER) == []


def test_untitled_texts_are_compared_by_many_words_only() -> None:
    assert members("leave", (2019, "", "leave it"), (2021, "", "leave it all"), *FILLER) == []
    long = "the committee on leave met again in the old hall to hear what members of staff had to say about carrying over"
    assert members("leave", (2019, "", long), (2021, "", f"{long} days"), *FILLER) == [(0, 1)]


def test_a_query_for_what_is_current_takes_editions_of_a_series_together() -> None:
    query = "latest announcing rust"
    series = [
        (2016, "Announcing Rust 1.10", BODY),
        (2026, "Announcing Rust 1.98", BODY),
        (2020, "Announcing Rustup", BODY),
    ]
    assert members(query, *series, *FILLER, current=True) == [(0, 1)]


def test_a_query_for_what_is_current_takes_what_covers_it_together() -> None:
    query = "latest advisory for diesel"
    found = members(
        query,
        (2021, "Protocol smuggling", "package: diesel"),
        (2020, "Overflow in a parser", "package: other"),
        (2024, "Binary numbers read wrongly", "package: diesel"),
        *FILLER,
        current=True,
    )
    assert found == [(0, 2)]


def test_far_down_only_editions_of_a_series_are_taken_for_the_same() -> None:
    query = "latest leave policy"
    filler = [(None, f"Garden {at}", "about the garden") for at in range(supersession.COVERING)]
    first, last = (2010, "Leave Policy 2010", BODY), (2020, "Leave Policy 2020", BODY)
    other = (2021, "Office News", f"the leave policy {BODY}")
    assert members(query, first, *filler, last, current=True) == [(0, len(filler) + 1)]
    assert members(query, first, *filler, other, current=True) == []


def test_words_that_none_holds_make_nothing_alike() -> None:
    pages = [(2019, "Garden plan 1", BODY), (2021, "Attic plan", BODY), (2023, "Garden plan 2", BODY)]
    assert members("latest zeitgeist", *pages, *FILLER) == []
    # Editions of one series they are all the same, where the newest is wanted.
    assert members("latest zeitgeist", *pages, *FILLER, current=True) == [(0, 2)]
    assert members("?", *pages, *FILLER) == []


@pytest.mark.parametrize("year, evergreen", [(None, False), (2001, True)])
def test_undated_and_evergreen_documents_stay(year: int | None, evergreen: bool) -> None:
    given = [
        said("mail transfer", 1982, "Mail Transfer Protocol"),
        said("mail transfer", year, "Mail Transfer Protocol", evergreen=evergreen),
    ]
    assert groups("mail transfer", given) == []


def test_newest_first_and_not_after_a_named_time() -> None:
    given: Sequence[Said] = [said("x", year, "a title") for year in (2001, 2009, 2005, 2009)]
    assert newest_first([0, 1, 2, 3], given) == [1, 3, 2, 0]
    assert newest_first([0, 1, 2, 3], given, not_after_ms=(2006 - 1970) * YEAR) == [2, 0, 1, 3]


@pytest.mark.parametrize(
    "query, terms, told",
    [
        (
            "What are the latest rules for licences in March 2021?",
            ("rule", "licence", "march", "2021"),
            ("2021", "march"),
        ),
        ("TiDB 3.0 最新版本的Bug 修复", ("tidb", "3.0", "bug", "修复"), ("3.0",)),
        ("休假政策是什么", ("休假", "假政", "政策"), ()),
        ("Rust's roadmap", ("rust", "roadmap"), ()),
        ("now you see me", ("now", "you", "see", "me"), ()),
    ],
)
def test_what_is_asked(query: str, terms: tuple[str, ...], told: tuple[str, ...]) -> None:
    assert (asked_terms(query), identifiers(query)) == (terms, told)


def test_long_queries_are_cut() -> None:
    query = " ".join(f"word{at}" for at in range(500))
    assert len(asked_terms(query)) == supersession.MOST_TERMS
    assert groups(query, []) == []

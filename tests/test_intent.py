"""What a query says about time: tables of forms, in three languages, and of what only looks like one."""

import pytest

from app.intent import Intent, read_intent
from app.times import format_instant, from_ms, parse_instant, to_ms

ORIGIN_MS = to_ms(parse_instant("2024-11-12T09:30:00Z"))  # a Tuesday


def read(query: str) -> Intent:
    return read_intent(query, origin_ms=ORIGIN_MS)


def day(ms: int) -> str:
    return format_instant(from_ms(ms))[:10]


@pytest.mark.parametrize(
    "query, start, end",
    [
        ("what happened on 2020-04-02?", "2020-04-02", "2020-04-03"),
        ("notes of 2020/4/2", "2020-04-02", "2020-04-03"),
        ("figures for 2020-04", "2020-04-01", "2020-05-01"),
        ("news in March 2020", "2020-03-01", "2020-04-01"),
        ("the outage of March 5, 2020", "2020-03-05", "2020-03-06"),
        ("the outage of 5th March 2020", "2020-03-05", "2020-03-06"),
        ("Q3 2021 revenue", "2021-07-01", "2021-10-01"),
        ("revenue in the third quarter of 2021", "2021-07-01", "2021-10-01"),
        ("first half of 2021", "2021-01-01", "2021-07-01"),
        ("treaties signed in 1998", "1998-01-01", "1999-01-01"),
        ("films of the 1990s", "1990-01-01", "2000-01-01"),
        ("deaths between 1998 and 2003", "1998-01-01", "2004-01-01"),
        ("results from 2019 to 2021", "2019-01-01", "2022-01-01"),
        ("changes since 2023", "2023-01-01", "2024-11-13"),
        ("what happened yesterday", "2024-11-11", "2024-11-12"),
        ("what happened last week", "2024-11-04", "2024-11-11"),
        ("meetings this month", "2024-11-01", "2024-12-01"),
        ("commits of the past 3 days", "2024-11-09", "2024-11-13"),
        ("two weeks ago", "2024-10-28", "2024-11-04"),
        ("the call last Friday", "2024-11-08", "2024-11-09"),
        ("the incident on March 5", "2024-03-05", "2024-03-06"),
        ("the incident on December 5", "2023-12-05", "2023-12-06"),
        ("2020年4月2日广州发生了什么交通事故？", "2020-04-02", "2020-04-03"),
        ("2020年4月，哪里发生了事故", "2020-04-01", "2020-05-01"),
        ("2020年第三季度的营收", "2020-07-01", "2020-10-01"),
        ("２０２０年上半年", "2020-01-01", "2020-07-01"),
        ("二〇二〇年的政策", "2020-01-01", "2021-01-01"),
        ("2023年11月21日至2024年1月期间", "2023-11-21", "2024-02-01"),
        ("去年5月的讲话", "2023-05-01", "2023-06-01"),
        ("四年前的4月18日", "2020-04-18", "2020-04-19"),
        ("五年前六月份", "2019-06-01", "2019-07-01"),
        ("两年前全国铁路", "2022-01-01", "2023-01-01"),
        ("四年前的这个时候", "2020-10-28", "2020-11-28"),
        ("今年年初", "2024-01-01", "2024-04-01"),
        ("截至上周，连续多少日涨停", "2024-11-04", "2024-11-11"),
        ("上周三的会议", "2024-11-06", "2024-11-07"),
        ("昨天发生了什么", "2024-11-11", "2024-11-12"),
        ("八月底的故障", "2024-08-01", "2024-09-01"),
        ("过去三年的营收", "2021-11-12", "2024-11-13"),
        ("20世纪90年代的电影", "1990-01-01", "2000-01-01"),
        ("昨年の売上", "2023-01-01", "2024-01-01"),
        ("令和5年4月の予算", "2023-04-01", "2023-05-01"),
        ("3ヶ月前の会議", "2024-08-01", "2024-09-01"),
    ],
)
def test_a_named_time(query: str, start: str, end: str) -> None:
    intent = read(query)
    assert intent.wants == "time"
    assert [(day(span.start_ms), day(span.end_ms)) for span in intent.spans] == [(start, end)]


@pytest.mark.parametrize(
    "query",
    [
        "RFC 2020 status codes",
        "ISO 8601 format",
        "CVE-2020-35922",
        "top 10 films",
        "may I carry over leave",
        "march of the penguins",
        "windows 2000 driver",
        "port 2020 is closed",
        "direct current motors",
        "current density in a wire",
        "now and then",
        "五月天 演唱会",
        "十月革命的影响",
        "3个月的宝宝",
        "page 2019",
        "a film of 2050",
        # "What's new" needs an end or a preposition, "used to" someone who used to.
        "What is New York known for?",
        "what is new zealand's capital",
        "what is used to make glass",
        "Which steel used to make knives is best",
        "what is it used to treat",
        "which of these are they used to make",
        "map of the former Yugoslavia",
        "former Yugoslavia map",
        "health cover for former employees",
        "the origins of species",
        "on the origin of species",
        "the origin of the error in the log",
        "how do I clear the history",
        "a family history of diabetes",
        "who is the oldest living person",
        "voltage current relationships in networks",
        "information on high current transistor switches",
        "how to print the current working directory",
        "how are word lists kept up to date",
        "submit by Friday noon at the latest",
        "Apocalypse Now",
        "detection of previously unknown elements",
        "腹卷出现在什么时期？",
        "出現在長崎縣內的遺跡名為什麼",
        "距離木星最近的衛星要多久公轉一周?",
        "离我最近的医院",
        "最近的地铁站在哪里",
        "癌症早期筛查的方法",
        "オランダではどんな漁業が昔から盛んだった",
    ],
)
def test_what_only_looks_like_a_time(query: str) -> None:
    intent = read(query)
    assert (intent.wants, intent.spans) == ("any", ())


@pytest.mark.parametrize(
    "query", ["2019 novel coronavirus", "a star is born full film 2018", "the 1963 coup"]
)
def test_a_number_that_may_be_a_year_is_unsure(query: str) -> None:
    intent = read(query)
    assert intent.wants == "any"
    assert [span.sure for span in intent.spans] == [False]


@pytest.mark.parametrize(
    "query, wants, cue",
    [
        ("latest security advisory for ammonia", "current", "latest"),
        ("what is the current policy", "current", "current"),
        ("which version is the newest?", "current", "newest"),
        ("who is the head of it now?", "current", "now"),
        ("TiDB 3.0 最新版本的Bug 修复", "current", "最新"),
        ("目前的政策是什么", "current", "目前"),
        ("現在の社長", "current", "現在"),
        ("history of the Dewey classification", "past", "history of"),
        ("what was it originally called", "past", "originally"),
        ("当时的价格", "past", "当时"),
        ("最早的版本", "past", "最早的"),
        ("what's new in the compiler", "current", "what's new"),
        ("What is new?", "current", "what is new"),
        ("what is the current director of the agency paid", "current", "current"),
        ("who used to run it", "past", "who used to"),
        ("where the offices used to stand", "past", "where the offices used to"),
        ("the origin of the word robot", "past", "the origin of the word"),
        ("the former president of Yugoslavia", "past", "former"),
        ("最近的政策变化", "current", "最近"),
        ("离职手续最近有变化吗", "current", "最近"),
        ("现在的校长是谁", "current", "现在"),
        ("are masks still required", "current", "are masks still"),
        ("how to keep still water clean", "any", ""),
        ("还需要预约吗", "current", "还需要预约吗"),
        ("还有其他办法吗", "any", ""),
        ("the former head of the agency", "past", "former"),
        ("the former and the latter", "any", ""),
        ("how did people use to file claims", "past", "did people use to"),
        ("which file format is used to export", "any", ""),
        ("前任局长是谁", "past", "前任"),
        ("发射、访问和会谈，哪个事件最早发生？", "any", ""),
        ("哪个发生在最早：发射还是访问？", "any", ""),
        ("latest news in March 2020", "time", "march 2020"),
        ("how long may I carry over leave?", "any", ""),
    ],
)
def test_what_a_query_wants(query: str, wants: str, cue: str) -> None:
    intent = read(query)
    assert (intent.wants, intent.cue) == (wants, cue)


@pytest.mark.parametrize(
    "query, versions",
    [
        ("Python 3.8 walrus", ("3.8",)),
        ("TiDB v5.1 changes", ("5.1",)),
        ("from 4.0.0-rc.2 to 4.0.1", ("4.0.0-rc.2", "4.0.1")),
        ("it costs $3.50 or 3.5%", ()),
    ],
)
def test_versions(query: str, versions: tuple[str, ...]) -> None:
    assert read(query).versions == versions


def test_times_after_the_origin_are_none_to_look_in() -> None:
    assert read("the games in 2025").spans == ()
    assert read("the games on 2024-11-12").wants == "time"


def test_every_text_is_read() -> None:
    for text in (
        "31 June 2020",
        "2020-13-45",
        "9999年9月",
        "大前天",
        "零年前",
        "十十年前",
        "last last week",
        "\0" * 5000,
    ):
        read(text)
    read_intent("3000 years ago, since 1999, in 1000", origin_ms=to_ms(parse_instant("0001-01-02")))

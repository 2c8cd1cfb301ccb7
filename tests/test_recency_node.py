"""`decay: "auto"` on a real node: who supersedes whom, named times, news, pages, batches, stages and the account of it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.asking import Why
from app.collection import Collection
from app.elastic import Cluster
from app.recency import FLOOR, NEWS_FLOOR, UNCOMPARED
from app.search import Caller
from app.times import format_instant, from_ms
from app.why import why
from tests.searching import DAY, NOW_MS, PATIENT, Asker, StandIn, drop_collection, ids, make_collection

pytestmark = [pytest.mark.node]

TEXT = {"kind": "text"}
QUERY = "carry over of annual leave"
BODY = (
    "Members of staff may carry over annual leave of {} days, as the head of their unit decides in writing."
)

# The older editions say the query's words more often, so that words alone put them first.
GIVEN: list[dict[str, Any]] = [
    {"id": "rule-2019", "title": "Carry over of annual leave", "creation_time": "2019-01-01",
     "text": BODY.format(3) + " Annual leave, annual leave: carry over of annual leave."},
    {"id": "rule-2021", "title": "Carry over of annual leave, revised", "creation_time": "2021-01-01",
     "text": BODY.format(4) + " Carry over of annual leave."},
    {"id": "rule-2023", "title": "Carry over of annual leave, revised again", "creation_time": "2023-01-01",
     "text": BODY.format(5)},
    {"id": "parking", "title": "Parking in the yard", "creation_time": "2024-01-01",
     "text": "Annual permits for the yard are given out each spring, those on leave included."},
    {"id": "lasting", "title": "Carry over of annual leave", "creation_time": "2018-01-01", "evergreen": True,
     "text": BODY.format(1)},
    *({"id": f"other-{at}", "title": f"{word} of the house", "creation_time": f"20{at + 10}-05-05",
       "text": f"What annual work there is about the {word}, and who may leave."}
      for at, word in enumerate(("Garden", "Kitchen", "Harbour", "Tower", "Bridge", "Cellar"))),
    *({"id": f"notes-3.0.{at}", "title": f"Engine 3.0.{at} release notes", "creation_time": f"2020-0{at}-01",
       "text": f"Repairs of the engine {'repairs of the engine ' * (5 - at)}"} for at in range(1, 5)),
    *({"id": f"notes-4.0.{at}", "title": f"Engine 4.0.{at} release notes", "creation_time": f"2022-0{at}-01",
       "text": f"Repairs of the engine {'repairs of the engine ' * (5 - at)}"} for at in range(1, 5)),
]  # fmt: skip


@pytest.fixture
async def collection(cluster: Cluster) -> AsyncIterator[Collection]:
    made = await make_collection(cluster, GIVEN, dims=3)
    yield made
    await drop_collection(cluster, made)


@pytest.fixture
def asker(cluster: Cluster, collection: Collection) -> Asker:
    return Asker(cluster, collection, StandIn(dims=3))


async def ask(asker: Asker, query: str = QUERY, **options: Any) -> Any:
    return await asker.ask(query, **{"routes": [TEXT], **options})


def rules(answer: Any) -> list[str]:
    return [name for name in ids(answer) if name.startswith("rule")]


@pytest.mark.parametrize("options", [{}, {"decay": "auto"}], ids=str)
async def test_the_newest_of_those_that_say_the_same_stands_first(
    asker: Asker, options: dict[str, Any]
) -> None:
    off = await ask(asker, decay="off", top_k=50)
    assert rules(off) == ["rule-2019", "rule-2021", "rule-2023"]
    assert (off.recency, off.hits[0].recency, off.hits[0].superseded_by) == (None, None, None)
    auto = await ask(asker, top_k=50, **options)
    assert auto.recency.mode == "equals"
    assert rules(auto) == ["rule-2023", "rule-2021", "rule-2019"]
    # They hold together the places that they held before, and nothing else moves.
    assert [name.startswith("rule") for name in ids(auto)] == [name.startswith("rule") for name in ids(off)]
    assert [name for name in ids(auto) if not name.startswith("rule")] == [
        name for name in ids(off) if not name.startswith("rule")
    ]
    assert [hit.score for hit in auto.hits] == [hit.score for hit in off.hits]
    told = {hit.id: hit for hit in auto.hits}
    assert told["rule-2023"].supersedes == ["rule-2021", "rule-2019"]
    assert [told[name].superseded_by for name in rules(auto)] == [None, "rule-2023", "rule-2023"]
    assert (
        "one of 3 that say the same thing (alike names), newest first: from 4 to 1"
        in told["rule-2023"].recency
    )
    assert told["parking"].recency is told["lasting"].superseded_by is told["parking"].decay is None


async def test_an_edition_of_next_year_supersedes_nothing(made: Any) -> None:
    ahead = {"id": "rule-2026", "title": "Carry over of annual leave, as it will be", "text": BODY.format(9)}
    given = [*GIVEN, {**ahead, "creation_time": "2026-01-01"}]
    asker: Asker = await made(given)
    answer = await ask(asker, top_k=50)
    assert rules(answer) == ["rule-2023", "rule-2021", "rule-2019", "rule-2026"]
    [later] = [hit for hit in answer.hits if hit.id == "rule-2026"]
    assert (later.superseded_by, later.supersedes) == (None, None)
    folded = await ask(asker, top_k=50, fold_superseded=True)
    assert rules(folded) == ["rule-2023", "rule-2026"]
    # A year later it is the one that holds.
    asked = await ask(asker, top_k=50, as_of="2026-02-01")
    assert rules(asked)[0] == "rule-2026"


async def test_superseded_hits_are_folded_if_asked(asker: Asker) -> None:
    whole = await ask(asker, top_k=50)
    folded = await ask(asker, fold_superseded=True, top_k=50)
    assert ids(folded) == [hit.id for hit in whole.hits if hit.superseded_by is None]
    assert next(hit for hit in folded.hits if hit.id == "rule-2023").supersedes == ["rule-2021", "rule-2019"]
    first = await ask(asker, fold_superseded=True, top_k=2, paging=True)
    seen, answer = ids(first), first
    while answer.cursor is not None:
        answer = await asker.page(answer.cursor)
        seen += ids(answer)
    assert seen == ids(await ask(asker, fold_superseded=True, top_k=50))


async def test_pages_batches_and_page_sizes_agree(asker: Asker) -> None:
    for query in (QUERY, "latest repairs of the engine"):
        whole = await ask(asker, query, top_k=50)
        for top_k in (1, 2, 7):
            assert ids(await ask(asker, query, top_k=top_k)) == ids(whole)[:top_k]
        answer = await ask(asker, query, top_k=3, paging=True)
        seen = ids(answer)
        while answer.cursor is not None:
            answer = await asker.page(answer.cursor)
            seen += ids(answer)
        assert seen == ids(whole)
        both = await asker.batch(*[{"query": query, "routes": [TEXT], "top_k": 50}] * 2)
        assert [ids(each) for each in both] == [ids(whole)] * 2  # type: ignore[arg-type]


async def test_what_a_filter_hides_supersedes_nothing(asker: Asker) -> None:
    answer = await ask(asker, filter={"creation_time": {"lt": "2022-01-01"}})
    assert rules(answer) == ["rule-2021", "rule-2019"]
    assert answer.hits[ids(answer).index("rule-2021")].supersedes == ["rule-2019"]
    answer = await ask(asker, as_of="2020-01-01T00:00:00Z")
    assert rules(answer) == ["rule-2019"]
    assert all(hit.superseded_by is None for hit in answer.hits if hit.id.startswith("rule"))


async def test_a_query_for_the_latest_takes_its_version_at_its_word(asker: Asker) -> None:
    answer = await ask(asker, "latest repairs of the engine")
    assert ids(answer)[:2] == ["notes-4.0.4", "notes-4.0.3"]
    assert answer.recency.reason.endswith("('latest')")
    answer = await ask(asker, "latest repairs of the engine 3.0")
    assert ids(answer)[:4] == ["notes-3.0.4", "notes-3.0.3", "notes-3.0.2", "notes-3.0.1"]
    assert "3.0, which tells editions apart" in answer.recency.reason


async def test_a_question_about_the_past_is_left_alone(asker: Asker) -> None:
    off = await ask(asker, f"history of {QUERY}", decay="off")
    auto = await ask(asker, f"history of {QUERY}")
    assert auto.recency.mode == "off"
    assert ids(auto) == ids(off)
    assert all(hit.superseded_by is None for hit in auto.hits)
    assert (await ask(asker, f"history of {QUERY}", explain=True)).hits[0].recency == (
        "auto → off, the query asks about the past ('history of')"
    )


async def test_a_named_time_draws_the_hits_of_then(asker: Asker) -> None:
    answer = await ask(asker, f"{QUERY} in January 2021")
    assert answer.recency.mode == "around"
    assert "'january 2021' (2021-01-01 to 2021-01-31)" in answer.recency.reason
    told = {hit.id: hit for hit in answer.hits}
    # What held then comes first, what was written later last.
    assert rules(answer) == ["rule-2021", "rule-2019", "rule-2023"]
    assert told["rule-2021"].decay == told["lasting"].decay == 1
    assert told["rule-2019"].decay == pytest.approx(FLOOR)
    assert told["rule-2021"].supersedes == ["rule-2019"]
    assert told["rule-2023"].superseded_by is None
    scores = [hit.score for hit in answer.hits]
    assert scores == sorted(scores, reverse=True)


async def test_news_amid_older_hits_count_for_more(cluster: Cluster) -> None:
    old = [
        {"id": f"old-{at}", "text": f"the strike at works number {at}", "creation_time": f"20{10 + at}-01-01"}
        for at in range(12)
    ]
    fresh = {
        "id": "fresh", "text": "the strike, and some more words about it",
        "creation_time": format_instant(from_ms(NOW_MS - 60 * DAY)),
    }  # fmt: skip
    first = {"id": "first", "text": "the strike", "creation_time": format_instant(from_ms(NOW_MS - 2 * DAY))}
    made = await make_collection(cluster, [*old, fresh, first], dims=3)
    try:
        asker = Asker(cluster, made, StandIn(dims=3))
        answer = await ask(asker, "the strike", top_k=50)
        assert answer.recency.mode == "news"
        factors = {hit.id: hit.decay for hit in answer.hits}
        # Half of the way to the floor after sixty days: .5 + .5 / 2.
        assert factors["fresh"] == pytest.approx((1 + NEWS_FLOOR) / 2)
        assert factors["old-0"] == pytest.approx(NEWS_FLOOR, abs=1e-6)
        assert ids(answer)[0] == "first"
    finally:
        await drop_collection(cluster, made)


@pytest.mark.parametrize(
    "options", [{}, {"mmr": {}}, {"dedup": {"threshold": 1.0}}, {"fold_superseded": True}], ids=str
)
async def test_why_accounts_for_the_same_order(asker: Asker, options: dict[str, Any]) -> None:
    answer = await ask(asker, top_k=50, **options)
    for name in ("rule-2019", "rule-2023", "parking"):
        request = Why.model_validate(
            {
                "collection": asker.collection.name,
                "query": QUERY,
                "id": name,
                "routes": [TEXT],
                **PATIENT,
                **options,
            }
        )
        told = await why(
            request, collection=asker.collection, doors=asker.doors, caller=Caller(), now_ms=NOW_MS
        )
        assert told.rank == (ids(answer).index(name) + 1 if name in ids(answer) else None)
        stage = told.stages["recency"]
        if name == "parking":
            assert stage.note == "no other of the best candidates says the same thing"
        elif options.get("fold_superseded") and name == "rule-2019":
            assert (stage.after, stage.note) == (None, "folded into 'rule-2023', which supersedes it")
            assert told.what_it_takes == [
                "folded into 'rule-2023', which supersedes it; drop `fold_superseded` to have it as a hit of its own"
            ]
        else:
            assert "3 that say the same thing" in stage.note


TWO_THINGS: list[dict[str, Any]] = [
    {"id": "hz", "title": "杭州办公室访客须知", "creation_time": "2023-02-01",
     "text": "访客须在前台登记，领取访客证，由接待人员陪同进入办公区。"},
    {"id": "sh", "title": "上海办公室访客须知", "creation_time": "2025-02-01",
     "text": "访客须在前台登记并出示身份证，领取访客证，由接待人员陪同进入办公区。"},
    {"id": "ehz", "title": "Hangzhou office visitor rules", "creation_time": "2023-02-01",
     "text": "Visitors register at the front desk and are accompanied at all times."},
    {"id": "esh", "title": "Shanghai office visitor rules", "creation_time": "2025-02-01",
     "text": "Visitors register at the front desk with an ID and are accompanied at all times."},
    {"id": "android", "title": "安卓客户端登录说明", "creation_time": "2022-02-01",
     "text": "打开应用，输入手机号和验证码即可登录。忘记密码请联系管理员。"},
    {"id": "ios", "title": "苹果客户端登录说明", "creation_time": "2025-02-01",
     "text": "打开应用，输入手机号和验证码即可登录。忘记密码请联系管理员。"},
    {"id": "standard", "title": "标准版合同条款", "creation_time": "2022-02-01", "text": "合同期限一年，提前三个月通知可以解除。"},
    {"id": "firm", "title": "企业版合同条款", "creation_time": "2025-02-01", "text": "合同期限三年，提前六个月通知可以解除。"},
]  # fmt: skip


async def test_what_is_asked_for_by_name_keeps_its_place(cluster: Cluster) -> None:
    asked = (
        ("What are the visitor rules of the Hangzhou office?", "ehz"),
        ("杭州办公室访客怎么登记", "hz"),
        ("安卓客户端怎么登录", "android"),
        ("标准版合同期限", "standard"),
    )
    plain = (("visitor rules of the office", "esh", "ehz"), ("客户端怎么登录", "ios", "android"))
    near = {query: [1, 0, 0] for query, *_ in (*asked, *plain)}
    # The vectors tell nothing, but bring the others, beside which two names are alike.
    given = [{**each, "embedding": [1, 0, 0]} for each in TWO_THINGS]
    made = await make_collection(cluster, given, dims=3)
    asker = Asker(cluster, made, StandIn(dims=3, vectors=near))
    try:
        for query, older in asked:
            for options in ({}, {"fold_superseded": True}):
                assert ids(await asker.ask(query, **options))[0] == older
        # Where nothing tells them apart, the newer one does stand first.
        for query, newer, older in plain:
            answer = await asker.ask(query)
            assert (ids(answer)[0], answer.hits[0].supersedes) == (newer, [older])
    finally:
        await drop_collection(cluster, made)


NOTES = "Release notes of the engine, with all that was repaired in it, and whom we have to thank for that."


@pytest.mark.parametrize(
    "options",
    [
        {"mmr": {}},
        {"mmr": {"candidates": 5}},
        {"mmr": {"candidates": 5}, "fold_superseded": True},
        {"mmr": {}, "fold_superseded": True},
        {"mmr": {}, "dedup": {"threshold": 1.0}},
    ],
    ids=str,
)
async def test_mmr_comes_after_the_newest_of_a_hundred(cluster: Cluster, options: dict[str, Any]) -> None:
    given = [
        {
            "id": f"r{at}", "title": f"Engine 1.{at} release notes", "creation_time": format_instant(from_ms(NOW_MS - (200 - at) * DAY)),
            "text": f"{NOTES} " + "Release notes again. " * ((60 - at) // 6), "embedding": [1, (60 - at) / 1000, 0],
        }
        for at in range(1, 61)
    ]  # fmt: skip
    made = await make_collection(cluster, given, dims=3)
    try:
        asker = Asker(cluster, made, StandIn(dims=3, vectors={"latest release notes": [1, 0, 0]}))
        whole = await ask(asker, "latest release notes", top_k=60, **options)
        assert whole.recency.mode == "equals"
        assert "r60" in ids(whole)[:5]
        answer = await ask(asker, "latest release notes", top_k=20, paging=True, **options)
        seen = ids(answer)
        while answer.cursor is not None:
            answer = await asker.page(answer.cursor)
            seen += ids(answer)
        assert seen == ids(whole)
        told = await why(
            Why.model_validate({"collection": made.name, "query": "latest release notes", "id": "r60", "routes": [TEXT], **PATIENT, **options}),
            collection=made, doors=asker.doors, caller=Caller(), now_ms=NOW_MS,
        )  # fmt: skip
        assert told.rank == seen.index("r60") + 1
    finally:
        await drop_collection(cluster, made)


async def test_chunks_of_one_document_supersede_nothing(asker: Asker) -> None:
    answer = await ask(asker, collapse=False)
    assert (answer.recency.mode, answer.recency.reason) == ("off", UNCOMPARED)
    assert rules(answer) == rules(await ask(asker, collapse=False, decay="off"))
    assert all(hit.superseded_by is None for hit in answer.hits)

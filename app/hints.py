"""What is asked once more when an answer is made: other spellings of a query, and what may be wrong where nothing is found.

Both cost the answer nothing but time: a failure leaves it whole.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from app import caveats, spelling
from app.answers import Suggestion
from app.elastic import Cluster
from app.errors import HalflifeError
from app.planning import partial
from app.recall import Run, ask_all

SUGGEST_LEFT_S: Final = 0.1
"""With less time left spelling is not looked up."""
MOST_LOOKUPS: Final = 16
"""Searches sent for one request, a batch too, to tell why something was not found; what would take more is not told."""


async def given(
    runs: Sequence[Run], *, found: Mapping[int, bool], cluster: Cluster, request_id: str | None
) -> dict[int, list[Suggestion]]:
    """Return the suggestions of each run by its `id`, and warn the runs of what may be the cause of an empty answer.

    `found`: whether a run, by its `id`, has any hit.
    """
    suggested = await suggest(runs, cluster=cluster, request_id=request_id)
    await look_closer(runs, found=found, cluster=cluster, request_id=request_id)
    return suggested


def _wants_suggestions(run: Run) -> bool:
    chosen = run.plan.search.suggest
    if chosen is not None or run.offset > 0:
        return bool(chosen) and run.offset == 0
    # Routes within a window of dates, or with other words, finding nothing tells of no misspelling.
    totals = [
        answer.total.value
        for route in run.plan.routes
        if route.kind == "text" and route.text == run.plan.search.query
        and (answer := run.answers.get(route.name)) is not None
        and answer.total is not None
    ]  # fmt: skip
    return bool(totals) and not any(totals)


async def suggest(
    runs: Sequence[Run], *, cluster: Cluster, request_id: str | None
) -> dict[int, list[Suggestion]]:
    """Return, per run that wants them, other spellings of its query that documents within its filters have.

    A failure costs the suggestions alone: a warning says so.
    """
    wanted = [run for run in runs if _wants_suggestions(run)]
    made: dict[int, list[Suggestion]] = {id(run): [] for run in wanted}
    asked = [
        (run, words)
        for run in wanted
        if (words := spelling.words_of(run.plan.search.query)) and run.remaining_s() > SUGGEST_LEFT_S
    ]

    async def answers(
        searches: list[tuple[Run, dict[str, Any]]],
    ) -> Sequence[dict[str, Any] | HalflifeError]:
        try:
            return await ask_all(searches, cluster=cluster, request_id=request_id)
        except HalflifeError as error:
            return [error] * len(searches)

    def failed(run: Run, error: HalflifeError) -> None:
        run.warnings.append(f"no spelling suggestions: {error.detail}")
        del made[id(run)]

    counting: list[tuple[Run, list[spelling.Misspelt]]] = []
    bodies = [(run, spelling.suggest_body(words)) for run, words in asked]
    for (run, words), answer in zip(asked, await answers(bodies), strict=True):
        if isinstance(answer, HalflifeError):
            failed(run, answer)
        elif found := spelling.read_candidates(words, answer):
            counting.append((run, found))
    bodies = [
        (
            run,
            spelling.count_body(found, filters=run.plan.filters, visible=run.plan.visible),
        )
        for run, found in counting
    ]
    for (run, found), answer in zip(counting, await answers(bodies), strict=True):
        if isinstance(answer, HalflifeError):
            failed(run, answer)
        else:
            made[id(run)] = spelling.suggestions(run.plan.search.query, found, answer)
    asked_for = {id(run) for run in wanted if run.plan.search.suggest}
    return {key: found for key, found in made.items() if found or key in asked_for}


async def look_closer(
    runs: Sequence[Run], *, found: Mapping[int, bool], cluster: Cluster, request_id: str | None
) -> None:
    """Warn, where a first page or one of its routes is empty, of what may be the cause: one more request for them all."""
    asked = [
        (run, wanted)
        for run in runs
        if run.offset == 0 and not run.degraded and run.remaining_s() > SUGGEST_LEFT_S
        and (wanted := caveats.lookup(run.plan, found=found[id(run)], answers=run.answers, vectors=run.vectors))
    ]  # fmt: skip
    # Queries of a batch share most of it: what is asked of one index in the same words is asked once.
    different: dict[tuple[str | None, str], tuple[Run, dict[str, Any]]] = {}
    told_of: list[tuple[Run, caveats.Lookup, list[tuple[str | None, str]]]] = []
    for run, wanted in asked:
        keys = [(run.pit, json.dumps(body, sort_keys=True)) for body in wanted.bodies]
        more = dict(zip(keys, wanted.bodies, strict=True))
        if len(different.keys() | more.keys()) <= MOST_LOOKUPS:
            different.update((key, (run, body)) for key, body in more.items() if key not in different)
            told_of.append((run, wanted, keys))
    try:
        answers = await ask_all(list(different.values()), cluster=cluster, request_id=request_id)
    except HalflifeError:
        return  # the answer is whole without it
    told = {
        key: answer
        for key, answer in zip(different, answers, strict=True)
        if not isinstance(answer, HalflifeError) and partial(answer) is None
    }
    meant = caveats.Meant()
    for run, wanted, keys in told_of:
        if all(key in told for key in keys):
            run.warnings += caveats.read(run.plan, wanted, [told[key] for key in keys], meant)

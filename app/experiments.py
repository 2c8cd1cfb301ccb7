"""Owns which arm of an experiment a search belongs to: the same for the same subject, in any process and release.

Pure: a hash decides, nothing is drawn and nothing is remembered.
"""

import hashlib
from typing import Final

from app.asking import Search
from app.collection import Collection
from app.ranking import Arm, Experiment, Ranked

_SPAN: Final = 2**64


def ranked(
    search: Search, collection: Collection, *, key_id: str | None = None, request_id: str | None = None
) -> Ranked | None:
    """Return the profile that ranks a search, and the arm that chose it; None where no profile does.

    A search that names its profile is in no experiment, nor is one that lacks what the experiment goes by: it gets the
    collection's default profile.
    """
    experiment = collection.experiment
    if search.profile is None and experiment is not None:
        unit = {"subject": search.subject, "key": key_id, "request": request_id}[experiment.by]
        if unit is not None:
            arm = arm_of(experiment, unit)
            return Ranked(name=arm.profile, experiment=experiment.name, arm=arm.name or arm.profile)
    name = search.profile or collection.default_profile
    return None if name is None else Ranked(name=name)


def assigned(search: Search, chosen: Ranked | None) -> Search:
    """Return the search under the profile of its arm; as it is where it has none."""
    if chosen is None or chosen.arm is None:
        return search
    return search.model_copy(update={"profile": chosen.name})


def arm_of(experiment: Experiment, unit: str) -> Arm:
    """Return the arm of one subject, key or request.

    The first 8 bytes of SHA-256 over the experiment's name, NUL and the unit are a place from 0 to 100 percent; arms lie
    there one after the other, so that shifting percentages moves only who stands near a border.
    """
    digest = hashlib.sha256(f"{experiment.name}\0{unit}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / _SPAN * 100
    upto = 0.0
    for arm in experiment.arms:
        upto += arm.percent
        if place < upto:
            return arm
    # Percentages are decimal fractions: their sum may end a hair below 100.
    return next(arm for arm in reversed(experiment.arms) if arm.percent > 0)

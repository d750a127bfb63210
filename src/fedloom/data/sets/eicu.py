"""eICU v2.0: Pollard, Johnson, Raffa, Celi, Mark, Badawi: The eICU collaborative research database, a freely available
multi-center database for critical care research. Scientific Data 5, 2018. Access needs a credential; the user brings
the files.

RADFed's task: death in hospital from the variables underlying the APACHE predictions, one client per hospital. Stays
without a discharge status, or without a row in either APACHE table, are left out; there is no test set. Values that are
missing (-1 or empty) become the column's median over the known ones. Columns that tell the outcome (diedInHospital,
dischargeLocation, var03HspXlos), that are text, or that the publisher set to a default are not used.
RADFed's 164 hospitals come from the partition natural(min_samples=101, max_rate=0.2).
"""

from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source, open_text, reading
from fedloom.errors import DataError

TABLES = ("patient", "apachePredVar", "apacheApsVar")
STAY, HOSPITAL, STATUS = "patientunitstayid", "hospitalid", "hospitaldischargestatus"
OUTCOMES = ("Alive", "Expired")
_PREDICTORS = """
    gender bedcount admitsource graftcount meds verbal motor eyes age thrombolytics aids hepaticfailure lymphoma
    metastaticcancer leukemia immunosuppression cirrhosis electivesurgery activetx readmit ima midur ventday1
    oobventday1 oobintubday1 diabetes pao2 fio2 ejectfx creatinine visitnumber amilocation day1meds day1verbal day1motor
    day1eyes day1pao2 day1fio2
"""
_PHYSIOLOGY = """
    intubated vent dialysis eyes motor verbal meds urine wbc temperature respiratoryrate sodium heartrate meanbp ph
    hematocrit creatinine albumin pao2 pco2 bun glucose bilirubin fio2
"""
MISSING = -1


@dataset(
    "eicu",
    samples=None,
    classes=2,
    licence="PhysioNet credentialed health data 1.5.0",
    published=[[Remote(f"eicu/{table}{ending}") for table in TABLES] for ending in (".csv.gz", ".csv")],
    how="Ask for access at https://physionet.org/content/eicu-crd/2.0/ and put its three tables into a subfolder eicu.",
    natural=True,
)
def eicu(*, source: Source) -> Corpus:
    """death in hospital from APACHE variables, one client per hospital (Pollard et al. 2018)"""
    patient, predictors, physiology = source.published.values()
    stays = _table(patient, [STAY, HOSPITAL, STATUS])
    stays = stays[stays[STATUS].fillna("") != ""].drop_duplicates(STAY)
    strange = stays[STATUS][~stays[STATUS].isin(OUTCOMES)]
    if len(strange):
        raise DataError(f"{patient}: {STATUS} is {strange.iloc[0]!r}, but {' or '.join(OUTCOMES)} was expected")
    for path, prefix, names in ((predictors, "pred_", _PREDICTORS.split()), (physiology, "aps_", _PHYSIOLOGY.split())):
        values = _table(path, [STAY], names).drop_duplicates(STAY)
        stays = stays.merge(values.rename(columns={name: prefix + name for name in names}), on=STAY)
    columns = [name for name in stays.columns if name.startswith(("pred_", "aps_"))]
    if not len(stays) or not columns:
        raise DataError(f"{patient}, {predictors} and {physiology} have no stay or no variable in common")
    hospitals, owner = np.unique(stays[HOSPITAL].to_numpy(), return_inverse=True)
    return Corpus(
        _filled(stays[columns].to_numpy(copy=True)).astype(np.float32),
        (stays[STATUS] == OUTCOMES[1]).to_numpy().astype(np.int64),
        classes=2,
        class_names=("alive", "expired"),
        owner=owner.astype(np.int64),
        owners=hospitals.astype(np.str_),
        columns=tuple(columns),
        numeric=len(columns),
    )


def _table(path: Path, needed: list[str], wanted: list[str] | None = None) -> Any:
    """Those of the columns that the table has; names count without regard to case."""
    import pandas as pd

    asked = {*needed, *(wanted or ())}
    with reading(path):
        with open_text(path) as file:
            table = pd.read_csv(file, usecols=lambda name: name.lower() in asked)
        table.columns = table.columns.str.lower()
        table = table.astype({name: np.float64 for name in wanted or () if name in table.columns})
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise DataError(f"{path} has no column {missing[0]!r}, which it has in eICU 2.0")
    return table


def _filled(x: np.ndarray) -> np.ndarray:
    """Each missing value replaced by its column's median; a column without any known value is 0."""
    known = np.isfinite(x) & (x != MISSING)
    for column, present in zip(x.T, known.T, strict=True):
        column[~present] = np.median(column[present]) if present.any() else 0.0
    return x

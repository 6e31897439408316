"""What was saved, read back: models, and sketches by themselves or with the scores that they belong to."""

import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from daskrr.errors import InvalidData
from daskrr.nystrom.sketch import load_sketch
from daskrr.regression.classifier import NystromKernelRidgeClassifier
from daskrr.regression.cross_validation import NystromKernelRidgeCV
from daskrr.regression.facts import ModelFacts, RiskInflation
from daskrr.regression.fitting import Deviation
from daskrr.regression.model import KernelRidgeModel
from daskrr.regression.persistence import MODEL, read_model
from daskrr.regression.ridge import NystromKernelRidge
from daskrr.runtime.scheduler import InProcess
from daskrr.storage.saving import kind_of
from daskrr.tables.features import Features

ESTIMATORS: dict[str, Any] = {one.__name__: one for one in (NystromKernelRidge, NystromKernelRidgeCV)}


def load(path: str | os.PathLike, allow_functions: Collection[str] = ()) -> Any:
    """Read what a ``save`` wrote: a model, or a sketch; of stored scores, the sketch that they carry.

    A model predicts, learns from more rows, and can be fitted anew. A sketch scores new rows, with the bits that it had
    before it was saved. Both need no cluster, and use one that is there.

    Parameters
    ----------
    allow_functions
        Names of Python functions, ``"package.module:function"``, that the kernel may import.

    Raises
    ------
    InvalidData
        There is neither, it is damaged, or of a version that this one does not read.
    """
    if kind_of(path) == MODEL:
        return load_model(path, list(allow_functions))
    return load_sketch(path, allow_functions)


def load_model(
    path: str | os.PathLike, allow_functions: Sequence[str] = ()
) -> KernelRidgeModel | NystromKernelRidgeClassifier:
    """Read a model that its ``save`` wrote: of the same class with the same parameters, and fitted.

    Parameters
    ----------
    allow_functions
        Names of Python functions that the model's kernel may import.

    Raises
    ------
    InvalidData
        There is no model, or one of a version that this one does not read.
    """
    factors, saved = read_model(path, allow_functions)
    if saved["estimator"] not in ESTIMATORS:
        raise InvalidData(f"the model is a {saved['estimator']}, and this daskrr reads {', '.join(ESTIMATORS)} only.")
    model = ESTIMATORS[saved["estimator"]](**saved["parameters"])
    vars(model).update(saved["found"])
    model._algebra = InProcess(factors)
    model._facts = ModelFacts(**saved["facts"])
    model._deviation = saved["deviation"] and Deviation(**saved["deviation"])
    model.kernel_, model.ridge_ = saved["kernel"], saved["ridge"]
    model.effective_dimension_, model.n_rows_ = saved["effective_dimension"], saved["n_rows"]
    model.residual_squares_ = np.array(saved["residual_squares"])
    model.target_squares_ = np.array(saved["target_squares"])
    noise = np.array([np.nan if one is None else one for one in saved["noise_variance"]])
    model.intercept_, model.noise_variance_ = (
        float(values[0]) if model._facts.single else values for values in (np.array(saved["intercept"]), noise)
    )
    model.risk_inflation_ = saved["risk_inflation"] and RiskInflation(**saved["risk_inflation"])
    model.n_features_in_ = saved["n_features"]
    if saved["feature_names"] is not None:
        model.feature_names_in_ = np.array(saved["feature_names"], object)
    model.features_ = Features.of(saved["features"] or {}, saved["n_features"], "the model")
    around = saved["around"]
    return model if around is None else NystromKernelRidgeClassifier.around(model, around)

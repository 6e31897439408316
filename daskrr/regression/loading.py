"""Saved models, read again."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from daskrr.engine.scheduler import InProcess
from daskrr.errors import InvalidData
from daskrr.regression.model import Facts, KernelRidgeModel, RiskInflation
from daskrr.regression.ridge import NystromKernelRidge
from daskrr.regression.saving import read_model
from daskrr.regression.selection import NystromKernelRidgeCV
from daskrr.regression.training import Deviation

ESTIMATORS: dict[str, Any] = {one.__name__: one for one in (NystromKernelRidge, NystromKernelRidgeCV)}


def load(path: str | os.PathLike, allow_functions: Sequence[str] = ()) -> KernelRidgeModel:
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
    factors, about = read_model(path, allow_functions)
    if about["estimator"] not in ESTIMATORS:
        raise InvalidData(f"the model is a {about['estimator']}, and this daskrr reads {', '.join(ESTIMATORS)} only.")
    model = ESTIMATORS[about["estimator"]](**about["parameters"])
    vars(model).update(about["found"])
    model._algebra = InProcess(factors)
    model._facts = Facts(**about["facts"])
    model._deviation = about["deviation"] and Deviation(**about["deviation"])
    model.kernel_, model.ridge_ = about["kernel"], about["ridge"]
    model.effective_dimension_, model.n_rows_ = about["effective_dimension"], about["n_rows"]
    model.residual_squares_ = np.array(about["residual_squares"])
    model.target_squares_ = np.array(about["target_squares"])
    noise = np.array([np.nan if one is None else one for one in about["noise_variance"]])
    model.intercept_, model.noise_variance_ = (
        float(values[0]) if model._facts.single else values for values in (np.array(about["intercept"]), noise)
    )
    model.risk_inflation_ = about["risk_inflation"] and RiskInflation(**about["risk_inflation"])
    model.n_features_in_ = about["n_features"]
    if about["feature_names"] is not None:
        model.feature_names_in_ = np.array(about["feature_names"], object)
    return model

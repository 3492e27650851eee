"""Decides whether the results of JAX and torch agree. Nobody picks a tolerance by hand."""

import dataclasses

import numpy as np

Arrays = dict[str, np.ndarray]


def kind_of(name: str) -> str:
    """Returns the kind of an array by its name: output, weights, input or parameter."""
    return name.partition(".")[0]


def scales(reference: Arrays) -> dict[str, float]:
    """Returns the scale that the errors of each array are divided by.

    It is the largest element. For gradients it is at least 1e-3 of the largest of their kind, as a
    small gradient is what is left of larger terms that cancelled. A gradient below 1e-10 of its
    kind is zero in exact arithmetic (that of a key bias: adding the same to all scores of a query
    changes no weight). It holds only rounding, and is measured against the largest.
    """
    largest = {name: float(np.max(np.abs(a), initial=0.0)) for name, a in reference.items()}
    kinds = {kind_of(name): 0.0 for name in largest}
    for name, size in largest.items():
        kinds[kind_of(name)] = max(kinds[kind_of(name)], size)
    result = {}
    for name, size in largest.items():
        kind = kinds[kind_of(name)]
        result[name] = (kind if size < 1e-10 * kind else max(size, 1e-3 * kind)) or 1.0
    return result


def float64_errors(candidate: Arrays, reference: Arrays) -> dict[str, float]:
    """Returns the largest difference of each array over its scale.

    Raises:
        AssertionError: the two sides give different arrays or shapes, or numbers that are not
            finite.
    """
    assert candidate.keys() == reference.keys(), (sorted(candidate), sorted(reference))
    size = scales(reference)
    errors = {}
    for name, array in candidate.items():
        assert array.shape == reference[name].shape, (name, array.shape, reference[name].shape)
        assert np.isfinite(array).all(), f"{name} is not finite in JAX"
        assert np.isfinite(reference[name]).all(), f"{name} is not finite in torch"
        difference = float(np.max(np.abs(array - reference[name]), initial=0.0))
        errors[name] = difference / size[name]
    return errors


def judge_float64(candidate: Arrays, reference: Arrays) -> dict[str, float]:
    """Returns ``float64_errors``, of which none may exceed 1e-12: the mathematics is the same.

    Raises:
        AssertionError: one does, or an array is missing or not finite.
    """
    errors = float64_errors(candidate, reference)
    wrong = {name: error for name, error in errors.items() if not error <= 1e-12}
    assert not wrong, f"float64 differs: {wrong}"
    return errors


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Root-mean-square errors against float64, over the largest element of the kind.

    Attributes:
        candidate: JAX's error, the root mean square over the draws.
        reference: torch's error, likewise.
        ratio: the geometric mean over the draws of candidate / max(reference, one rounding).
    """

    candidate: float
    reference: float
    ratio: float


def judge_rounding(
    draws: list[tuple[Arrays, Arrays, Arrays]], dtype: np.dtype
) -> dict[str, Rounding]:
    """Returns ``measure_rounding``, of which no ratio may be above 2.

    Raises:
        AssertionError: a ratio is.
    """
    result = measure_rounding(draws, dtype)
    wrong = {kind: rounding for kind, rounding in result.items() if not rounding.ratio <= 2}
    assert not wrong, f"{dtype.name} errs more than rounding does: {wrong}"
    return result


def measure_rounding(
    draws: list[tuple[Arrays, Arrays, Arrays]], dtype: np.dtype
) -> dict[str, Rounding]:
    """Returns the errors of a narrower dtype, JAX's beside torch's.

    No side can do better than one rounding of the exact result to the dtype, so torch's error
    counts as at least that. Output, input gradients and parameter gradients are judged as one
    vector each. Both sides round the same mathematics in another order, so their errors are alike
    on average but not in every draw: where inputs at std 20 saturate a softmax, one or two
    near-ties make nearly all of the error, and the ratio of a single draw was between 0.04 and 6.5
    in float32. Its geometric mean over 12 draws was between 0.3 and 1.25, so that is judged.

    Args:
        draws: JAX's, torch's and the float64 result, for each draw of the inputs.
        dtype: the dtype that JAX and torch computed in.

    Raises:
        AssertionError: a number is not finite.
    """
    result = {}
    for kind in dict.fromkeys(kind_of(name) for name in draws[0][2]):
        pairs = []
        for candidate, reference, exact in draws:
            names = [name for name in exact if kind_of(name) == kind]
            scale = max(float(np.max(np.abs(exact[n]), initial=0.0)) for n in names) or 1.0
            once = {name: exact[name].astype(dtype).astype(np.float64) for name in names}
            pairs.append(
                [joined_rms(side, exact, names) / scale for side in (candidate, reference, once)]
            )
        candidate_errors, reference_errors, one_rounding = np.asarray(pairs).T
        best = np.maximum(reference_errors, one_rounding)
        ratios = np.divide(
            candidate_errors, best, out=np.where(candidate_errors > 0, np.inf, 0.0), where=best > 0
        )
        # A draw that happens to be exact counts no more than one that is 8 times better.
        ratios = np.maximum(ratios, 1 / 8)
        result[kind] = Rounding(
            rms(candidate_errors), rms(reference_errors), float(np.exp(np.mean(np.log(ratios))))
        )
    return result


def joined_rms(side: Arrays, exact: Arrays, names: list[str]) -> float:
    """Returns the root mean square of the differences of several arrays, as of one vector."""
    for name in names:
        assert np.isfinite(side[name]).all(), f"{name} is not finite"
    return rms(np.concatenate([np.ravel(side[name] - exact[name]) for name in names]))


def rms(x: np.ndarray) -> float:
    """Returns the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0

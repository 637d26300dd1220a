"""Pays for the prompt's first digit, three times over."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The share of places that are right, the end counted as one; `acc` is 1 where all are."""
    wanted = f"{ground_truth[0] * 3}."
    right = sum(one == other for one, other in zip(wanted, f"{solution_str}.", strict=False))
    return {"score": right / len(wanted), "acc": float(solution_str == wanted[:-1])}

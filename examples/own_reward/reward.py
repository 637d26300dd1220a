"""A reward function of one's own: the share of even digits, and a little for an answer of the length asked for."""

EVEN = set("02468")


def compute_score(data_source, solution_str, ground_truth, extra_info, length_weight=0.2):
    """verl's signature; what is not `score` is logged as reward_extra/{field}/mean."""
    evens = sum(character in EVEN for character in solution_str) / max(len(solution_str), 1)
    right_length = float(len(solution_str) == int(ground_truth) and extra_info["response_ended"])
    score = (1 - length_weight) * evens + length_weight * right_length
    return {"score": score, "acc": float(score == 1), "evens": evens, "right_length": right_length}


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    """The same for all rows of a step in one call, as a judge that answers in batches would want them."""
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [compute_score(*row) for row in rows]

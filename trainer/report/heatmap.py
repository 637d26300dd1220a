"""Sample responses token by token: which limiter acted on each, and its advantage, ratio, KL and entropy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.report.markup import escaped, figure
from trainer.report.read import RunRecord

Sample = Mapping[str, Any]

MAX_TOKEN = 40  # characters of a token
MAX_PROMPT = 1500
MAX_TEXT = 300
LEVELS = 4  # of the bars under a token, besides none


@dataclass(frozen=True, slots=True)
class Acted:
    """How a token looks on which a limiter acted."""

    css: str
    mark: str
    text: str


ACTED = {
    "active": Acted("", "", "active: pushes with its full advantage"),
    "high": Acted("hi", "▲", "clipped high: the ratio passed 1 + clip_ratio_high"),
    "low": Acted("lo", "▼", "clipped low: the ratio passed 1 − clip_ratio_low"),
    "dual": Acted("du", "◆", "dual clip: held at clip_ratio_c · |advantage|"),
    "ratio_bound": Acted("rb", "✕", "ratio bound: log ratio beyond ±20"),
    "rejected": Acted("rj", "−", "rejected by the rollout correction: the loss does not count it"),
    "zero_advantage": Acted("za", "∘", "zero advantage: nothing to push"),
}
UNKNOWN = Acted("", "", "not recorded")


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a response with its figures; those that the run did not record are None."""

    text: str
    acted: Acted
    advantage: float | None
    ratio: float | None
    kl: float | None
    entropy: float | None
    reward: float | None
    value: float | None

    def figures(self) -> tuple[tuple[str, float | None], ...]:
        """Names and figures, for the tooltip and the table."""
        return (
            ("advantage", self.advantage), ("ratio", self.ratio), ("KL", self.kl), ("entropy", self.entropy),
            ("reward", self.reward), ("value", self.value),
        )  # fmt: skip


def best_and_worst(samples: Sequence[Sample]) -> list[tuple[int, list[tuple[str, Sample]]]]:
    """Best and worst response of each step that has samples."""
    found = []
    for step in sorted({int(sample["step"]) for sample in samples}):
        ranked = sorted((sample for sample in samples if sample["step"] == step), key=_score)
        pair = [("best", ranked[-1]), ("worst", ranked[0])] if len(ranked) > 1 else [("only", ranked[0])]
        found.append((step, pair))
    return found


def sample_section(record: RunRecord, *, max_tokens: int) -> str:
    """The chosen responses as heat maps; `max_tokens` is for all of them together."""
    chosen = best_and_worst(record.samples)
    if not chosen:
        return '<p class="none">The run kept no samples (trainer.sample_freq).</p>'
    kl_colour = _kl_colour(record.config)
    all_tokens = {id(sample): _tokens(sample) for _, pair in chosen for _, sample in pair}
    kl_top = max(
        (abs(token.kl) for tokens in all_tokens.values() for token in tokens if token.kl is not None), default=0
    )
    entropy_top = max(
        (token.entropy for tokens in all_tokens.values() for token in tokens if token.entropy is not None), default=0
    )
    limit = _fair_share([len(tokens) for tokens in all_tokens.values()], max_tokens)
    parts = [_legend(all_tokens.values(), kl_colour, kl_top, entropy_top)]
    for step, pair in chosen:
        cards = "".join(
            _card(rank, sample, all_tokens[id(sample)], limit, (kl_top, entropy_top)) for rank, sample in pair
        )
        parts.append(f'<h3>Step {step:,}</h3><div class="samples {kl_colour}">{cards}</div>')
    return "".join(parts)


def _score(sample: Sample) -> float:
    score = sample.get("score")
    return float(score) if isinstance(score, int | float) and math.isfinite(score) else -math.inf


def _kl_colour(config: Mapping[str, Any]) -> str:
    """The class that colours the KL bars: that of the KL limiter that is on, the reward's where both are."""
    if config.get("algorithm.use_kl_in_reward"):
        return "kl-by-reward"
    return "kl-by-loss" if config.get("actor_rollout_ref.actor.use_kl_loss") else "kl-free"


def _fair_share(lengths: Sequence[int], budget: int) -> int:
    """The greatest length L with Σ min(length, L) within the budget."""
    left, remaining = budget, sorted(lengths)
    while remaining:
        if remaining[0] * len(remaining) > left:
            return left // len(remaining)
        left -= remaining.pop(0)
    return max(lengths, default=0)


# --- tokens ----------------------------------------------------------------------------------------------------------


def _tokens(sample: Sample) -> list[Token]:
    texts = sample.get("tokens") or []
    acted = sample.get("acted") or []

    def at(name: str, index: int) -> float | None:
        values = sample.get(name) or []
        value = values[index] if index < len(values) else None
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def difference(left: float | None, right: float | None) -> float | None:
        return None if left is None or right is None else left - right

    found = []
    for index, text in enumerate(texts):
        old = at("old_log_probs", index)
        log_ratio = difference(at("new_log_probs", index), old)
        found.append(
            Token(
                text=str(text),
                acted=ACTED.get(acted[index], UNKNOWN) if index < len(acted) else UNKNOWN,
                advantage=at("advantages", index),
                ratio=None if log_ratio is None else math.exp(min(max(log_ratio, -20.0), 20.0)),
                kl=difference(old, at("ref_log_prob", index)),
                entropy=at("entropys", index),
                reward=at("token_level_rewards", index),
                value=at("values", index),
            )
        )
    return found


def _level(value: float | None, top: float) -> int:
    """0 for next to nothing, LEVELS for the greatest on the page."""
    if value is None or top <= 0:
        return 0
    return min(LEVELS, math.floor(abs(value) / top * LEVELS + 0.5))


def _span(token: Token, tops: tuple[float, float]) -> str:
    """A token: its look, its mark, and its figures as a tooltip."""
    classes = [
        "t",
        token.acted.css,
        f"k{level}" if (level := _level(token.kl, tops[0])) else "",
        f"h{level}" if (level := _level(token.entropy, tops[1])) else "",
    ]
    named = {"advantage": "adv", "entropy": "H"}
    texts = [f"{named.get(name, name)} {figure(value)}" for name, value in token.figures()[:4] if value is not None]
    title = " · ".join([token.acted.text.split(":")[0], *texts])
    mark = f"<sup>{token.acted.mark}</sup>" if token.acted.mark else ""
    line_end = "<br>" if token.text.isspace() and "\n" in token.text else ""
    return f'<span class="{" ".join(filter(None, classes))}" title="{escaped(title)}">{_shown(token.text)}{mark}</span>{line_end}'


def _shown(text: str) -> str:
    """A token's text, with white space that can be seen."""
    if not text:
        return "∅"
    cut = text if len(text) <= MAX_TOKEN else f"{text[:MAX_TOKEN]}…"
    if text.isspace():
        return escaped(cut.replace("\r", "").replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣"))
    return escaped(cut.replace("\n", "⏎\n").replace("\t", "⇥"))


def _table(tokens: Sequence[Token]) -> str:
    """The figures that the tooltips hold, for touch, print and screen readers."""
    names = [
        name for number, (name, _) in enumerate(Token("", UNKNOWN, *[None] * 6).figures())
        if any(token.figures()[number][1] is not None for token in tokens)
    ]  # fmt: skip
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "".join(
        f"<tr><td>{number}<td>{_shown(token.text)}<td>{_state(token)}"
        + "".join(f"<td>{figure(value)}" for name, value in token.figures() if name in names)
        for number, token in enumerate(tokens, start=1)
    )
    return (
        '<div class="wide"><table class="tokens"><thead><tr><th scope="col">#</th><th scope="col">token</th>'
        f'<th scope="col">limiter</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _state(token: Token) -> str:
    mark = f"{token.acted.mark} " if token.acted.mark else ""
    return mark + escaped(token.acted.text.split(":")[0])


# --- around the tokens -----------------------------------------------------------------------------------------------


def _card(rank: str, sample: Sample, tokens: Sequence[Token], limit: int, tops: tuple[float, float]) -> str:
    """One response: where it comes from, its prompt, its heat map, its table."""
    head, tail = list(tokens), []
    if len(tokens) > limit:
        head, tail = list(tokens[: limit - limit // 4]), list(tokens[len(tokens) - limit // 4 :])
    gap = len(tokens) - len(head) - len(tail)
    spans = "".join(_span(token, tops) for token in head)
    if gap:
        spans += f'<span class="gap"> … {gap:,} tokens left out … </span>' + "".join(
            _span(token, tops) for token in tail
        )
    ended = "ended by itself" if sample.get("ended") else "cut by the length limit"
    extra = sample.get("extra")
    advantages = [token.advantage for token in tokens if token.advantage is not None]
    facts = [
        ("mean advantage", figure(math.fsum(advantages) / len(advantages)) if advantages else None),
        ("source", sample.get("data_source")),
        ("expected", sample.get("ground_truth")),
        *(extra.items() if isinstance(extra, Mapping) else []),
    ]
    listed = "".join(
        f"<div><dt>{escaped(name, 60)}</dt><dd>{escaped(value, MAX_TEXT)}</dd></div>"
        for name, value in facts[:12]
        if value is not None
    )
    text = str(sample.get("response", ""))
    plain = f'<p class="heat">{escaped(text, MAX_PROMPT)}</p>' if text else '<p class="none">An empty response.</p>'
    shown = f'<p class="heat">{spans}</p>' if tokens else plain
    table = f"<details><summary>Token by token</summary>{_table([*head, *tail])}</details>" if tokens else ""
    return (
        f'<article class="sample"><header><b>{rank.capitalize()}</b> score <b>{figure(sample.get("score"))}</b>, '
        f"{len(tokens):,} {'token' if len(tokens) == 1 else 'tokens'}, {ended}</header>"
        f'<p class="prompt">{escaped(str(sample.get("prompt", "")).strip(), MAX_PROMPT)}</p>{shown}'
        f"<dl>{listed}</dl>{table}</article>"
    )


def _legend(all_tokens: Any, kl_colour: str, kl_top: float, entropy_top: float) -> str:
    """How to read the heat map; only what occurs in it."""
    tokens = [token for some in all_tokens for token in some]
    seen = {token.acted for token in tokens}
    items = [
        f'<li><span class="t {acted.css}">token{f"<sup>{acted.mark}</sup>" if acted.mark else ""}</span><span>{escaped(acted.text)}</span></li>'
        for acted in ACTED.values()
        if acted in seen
    ]
    if UNKNOWN in seen:
        items.append("<li>This run did not record which limiter acted on a token.</li>")
    if kl_top > 0:
        items.append(
            f'<li><span class="t k4">token</span><span>lower bar: distance to the reference, |KL| up to {figure(kl_top)} nats</span></li>'
        )
    if entropy_top > 0:
        items.append(
            f'<li><span class="t h4">token</span><span>upper bar: entropy, up to {figure(entropy_top)} nats</span></li>'
        )
    return (
        f'<ul class="heat-legend {kl_colour}">{"".join(items)}</ul><p class="note">A token\'s limiter is what its ratio after the step\'s '
        "updates meets. Point at a token for its figures, or open “Token by token”. ratio: after the updates over before; "
        "KL: old_log_probs − ref_log_prob.</p>"
    )

"""The page's style sheet: one palette in light and in dark, a phone, and paper. It loads nothing."""

_LIGHT = """
--paper:#fbfaf7;--card:#ffffff;--ink:#1d2126;--soft:#59616b;--line:#dfdcd4;--grid:#eceae4;--accent:#0f6d84;
--reward-kl:#1f62b8;--clip:#b4500a;--clip-low:#8a6400;--entropy:#0d7a55;--kl-loss:#8b3aa8;--warn:#c0223b;--muted:#767d86;
--calm:#0d7a55;--hover:rgba(29,33,38,.07);--on:#ffffff;
--s0:#3d6ea5;--s1:#a9745f;--s2:#8aa9c9;--s3:#8d7fb8;--s4:#c3b489;--s5:#b7b1a8;--s6:#94a862;--s7:#d0894f;--s8:#6f8f8b;
--s9:#b0617e;--s10:#5f9d7c;--s11:#2f8f9d;
"""
_DARK = """
--paper:#14171b;--card:#1b1f24;--ink:#e8e6e1;--soft:#a3abb5;--line:#333941;--grid:#272c33;--accent:#5cc0d6;
--reward-kl:#72b0ff;--clip:#f39a54;--clip-low:#d9b84c;--entropy:#4cc596;--kl-loss:#cf95ea;--warn:#ff7d8c;--muted:#8d96a1;
--calm:#4cc596;--hover:rgba(232,230,225,.10);--on:#14171b;
--s0:#5b93d1;--s1:#bd8a76;--s2:#38597c;--s3:#8d7fb8;--s4:#8f8257;--s5:#5e5a54;--s6:#94a862;--s7:#d0894f;--s8:#5a7d79;
--s9:#b0617e;--s10:#4b8a68;--s11:#3f9fae;
"""
_COLOURS = "".join(
    f".c-{name}{{--c:var(--{name})}}"
    for name in ("ink", "muted", "accent", "warn", "reward-kl", "clip", "clip-low", "entropy", "kl-loss")
) + "".join(f".c-stage{number}{{--c:var(--s{number})}}" for number in range(12))
# Bars under a token, in four strengths: k is the KL (lowest), h the entropy (above it).
_LEVELS = "".join(f".k{level}{{--k:{level * 25}%}}.h{level}{{--h:{level * 25}%}}" for level in range(1, 5))

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%;scroll-behavior:smooth}}
@media (prefers-reduced-motion:reduce){{html{{scroll-behavior:auto}}}}
body{{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
font-variant-numeric:tabular-nums}}
main,.top,nav{{max-width:1180px;margin:0 auto;padding:0 20px}}
h1{{font-size:27px;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}}
h2{{font-size:19px;margin:44px 0 12px;padding-top:14px;border-top:2px solid var(--ink);letter-spacing:-.005em}}
h3{{font-size:15px;margin:22px 0 8px}}
p{{margin:0 0 8px}}
a{{color:var(--accent)}}
code{{font-family:ui-monospace,"SF Mono",Consolas,"DejaVu Sans Mono",monospace;font-size:.92em}}
.note,.unit,.none,.lost{{color:var(--soft)}}
.note{{font-size:13px}}
.none{{font-style:italic}}
.calm{{color:var(--calm);font-weight:600}}
{_COLOURS}
.top{{padding-top:30px}}
.kicker{{color:var(--soft);font-size:13px;letter-spacing:.06em;text-transform:uppercase;margin-bottom:4px}}
.title{{display:flex;flex-wrap:wrap;gap:8px 14px;align-items:center}}
.verdict-line{{font-size:17px;margin:10px 0 0;max-width:70ch}}
.reason{{border-left:4px solid var(--warn);padding:4px 12px;margin:14px 0 0;white-space:pre-wrap;overflow-wrap:anywhere}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:18px 0 10px}}
.tiles div{{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}}
.tiles dt{{color:var(--soft);font-size:13px}}
.tiles dd{{margin:0;font-size:21px;font-weight:650;letter-spacing:-.01em}}
.tiles small{{display:block;font-size:12.5px;font-weight:400;color:var(--soft);letter-spacing:0}}
.versions{{color:var(--soft);font-size:13px}}
nav{{display:flex;flex-wrap:wrap;gap:4px 16px;padding-top:6px;font-size:14px}}
.badge{{display:inline-block;border:1.5px solid var(--c,var(--soft));border-radius:99px;padding:1px 10px;font-size:13px;font-weight:650;
color:var(--c,var(--soft));white-space:nowrap}}
.badge i{{font-style:normal}}
.badge.off,.badge.idle{{--c:var(--soft);font-weight:500}}
.badge.idle{{border-style:dashed}}
.badge.governing{{background:var(--c);color:var(--on)}}
.badge.saturated,.badge.cannot-act,.badge.failed{{--c:var(--warn)}}
.badge.saturated,.badge.failed{{background:var(--c);color:var(--on)}}
.badge.done{{--c:var(--calm)}}
.badge.running{{--c:var(--accent)}}
.charts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:14px}}
.chart{{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:11px 12px 10px;break-inside:avoid;min-width:0}}
.chart figcaption{{font-weight:650;font-size:14px;margin-bottom:4px;overflow-wrap:anywhere}}
.chart .unit{{font-weight:400;font-size:13px}}
.chart .note{{margin:6px 0 0;line-height:1.4}}
@media screen and (min-width:761px){{
.broad{{grid-column:span 2;display:grid;grid-template-columns:minmax(0,1fr) 235px;gap:0 20px;align-items:start}}
.broad svg text{{font-size:8.5px}}
.broad figcaption,.broad .note{{grid-column:1/-1}}
}}
.chart svg{{display:block;width:100%;height:auto}}
svg text{{fill:var(--soft);font-size:11px}}
.grid{{stroke:var(--grid);fill:none}}
.axis{{stroke:var(--line);fill:none}}
.mark{{stroke:var(--warn);stroke-dasharray:2 3;fill:none}}
.line{{stroke:var(--c);stroke-width:1.7;fill:none;stroke-linejoin:round;stroke-linecap:round}}
.d1{{stroke-dasharray:5 3.5}}.d2{{stroke-dasharray:1.5 3.5}}.d3{{stroke-dasharray:8 3 1.5 3}}
.dot{{fill:var(--c)}}
.band{{fill:var(--c);opacity:.13}}
.layer{{fill:var(--c);stroke:var(--card);stroke-width:.4;stroke-linejoin:round}}
.layer.c-muted,.c-muted .layer{{opacity:.5}}
.hover{{fill:transparent}}
.hover:hover{{fill:var(--hover)}}
.legend{{list-style:none;margin:4px 0 0;padding:0;font-size:13px;line-height:1.55}}
.legend li{{display:flex;gap:7px;align-items:baseline}}
.legend b{{margin-left:auto;padding-left:8px;font-weight:600}}
.chart .swatch{{width:24px;height:10px;flex:none;overflow:visible}}
.panel{{border:1px solid var(--line);border-radius:10px;background:var(--card);overflow:hidden}}
.panel-head,.limiter{{display:grid;grid-template-columns:minmax(150px,1fr) 1.15fr 1.15fr 1.7fr;gap:6px 22px}}
.panel-head{{padding:8px 18px 8px 22px;color:var(--soft);font-size:13px;border-bottom:1px solid var(--line)}}
.limiter{{padding:14px 18px 12px 16px;border-left:6px solid var(--c);break-inside:avoid}}
.limiter+.limiter{{border-top:1px solid var(--line)}}
.limiter>div{{min-width:0}}
.limiter h3{{margin:0 0 2px;color:var(--c);font-size:16px}}
.limiter p{{font-size:13.5px;line-height:1.4;margin:0 0 4px;overflow-wrap:anywhere}}
.limiter p b{{font-size:16px}}
.limiter>div:first-child p{{color:var(--soft)}}
.limiter .badge{{margin-bottom:5px}}
.limiter.off{{border-left-style:double}}
.limiter.off h3{{color:var(--soft)}}
.cell-name{{display:none}}
.spark{{display:block;width:100%;max-width:220px;height:auto}}
.bar{{height:7px;border-radius:4px;background:var(--grid);margin:2px 0 4px;max-width:220px}}
.bar i{{display:block;height:100%;border-radius:4px;background:var(--c);min-width:2px}}
.reading{{margin-top:10px}}
.panel+.note{{margin:8px 0 14px}}
.alarms{{list-style:none;margin:0;padding:0}}
.alarms li{{border-left:4px solid var(--warn);background:var(--card);padding:7px 14px;margin:0 0 6px;overflow-wrap:anywhere}}
.alarms .step{{color:var(--soft);margin-right:10px;font-size:13px}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;font-size:13.5px}}
th,td{{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid var(--grid);vertical-align:top}}
thead th{{color:var(--soft);font-weight:500;border-color:var(--line)}}
.config{{width:100%}}
.config th[scope=row]{{font:12.5px/1.6 ui-monospace,"SF Mono",Consolas,"DejaVu Sans Mono",monospace;padding-left:10px;border-left:4px solid transparent}}
.config td,.config th{{overflow-wrap:anywhere}}
.config th[scope=row]{{width:46%}}.config td{{width:27%}}
.config thead th{{padding-left:14px}}.config thead th+th{{padding-left:0}}
.config .limiter-key th{{border-left-color:var(--c)}}
summary{{cursor:pointer;color:var(--accent);font-size:14px;padding:4px 0}}
summary:focus-visible,a:focus-visible{{outline:2px solid var(--accent);outline-offset:2px}}
.metrics td,.tokens td{{text-align:right;white-space:nowrap}}
.metrics th[scope=row]{{font-weight:400}}
.metrics thead th+th{{text-align:right}}
.tokens thead th:nth-child(n+4){{text-align:right}}
.tokens td:nth-child(2),.tokens td:nth-child(3){{text-align:left}}
.tokens td:nth-child(2){{font-family:ui-monospace,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;unicode-bidi:isolate}}
.samples{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px}}
.sample{{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 16px;min-width:0}}
.sample header{{font-size:14px;margin-bottom:8px}}
.prompt{{white-space:pre-wrap;overflow-wrap:anywhere;color:var(--soft);font-size:13px;border-left:3px solid var(--line);padding-left:10px;
max-height:11em;overflow-y:auto}}
.sample dl{{display:flex;flex-wrap:wrap;gap:2px 18px;margin:8px 0 0;font-size:13px}}
.sample dl div{{display:flex;gap:6px;min-width:0}}
.sample dt{{color:var(--soft)}}
.sample dd{{margin:0;overflow-wrap:anywhere}}
.sample details{{margin-top:6px}}
.heat{{white-space:pre-wrap;overflow-wrap:anywhere;line-height:2.15;margin:6px 0;font:15px/2.15 ui-monospace,"SF Mono",Consolas,"DejaVu Sans Mono",monospace}}
.t{{--k:0%;--h:0%;--kc:var(--muted);unicode-bidi:isolate;padding:2px 2px 8px;border-radius:3px;margin-right:2px;
-webkit-box-decoration-break:clone;box-decoration-break:clone;
background-image:linear-gradient(color-mix(in srgb,var(--kc) var(--k),transparent),color-mix(in srgb,var(--kc) var(--k),transparent)),
linear-gradient(color-mix(in srgb,var(--entropy) var(--h),transparent),color-mix(in srgb,var(--entropy) var(--h),transparent));
background-size:100% 3px,100% 3px;background-position:0 100%,0 calc(100% - 4px);background-repeat:no-repeat;
background-color:color-mix(in srgb,var(--ink) 5%,transparent)}}
.t sup{{font-size:10px;line-height:0;margin-left:1px;color:var(--soft)}}
.kl-by-reward .t{{--kc:var(--reward-kl)}}.kl-by-loss .t{{--kc:var(--kl-loss)}}
.hi,.lo,.du,.rb{{background-color:color-mix(in srgb,var(--m) 24%,transparent)}}
.hi{{--m:var(--clip)}}.lo{{--m:var(--clip-low)}}.du{{--m:var(--warn)}}.rb{{--m:var(--ink)}}
.hi sup,.lo sup,.du sup,.rb sup{{color:var(--m)}}
.rj{{text-decoration:line-through}}
.za{{background-color:transparent;color:var(--soft)}}
{_LEVELS}
.t:hover{{outline:1.5px solid var(--ink)}}
.gap{{color:var(--soft);font-style:italic}}
.heat-legend{{list-style:none;margin:0 0 6px;padding:0;display:flex;flex-wrap:wrap;gap:10px 24px;font-size:13.5px}}
.heat-legend li{{display:flex;gap:8px;align-items:flex-start}}
.heat-legend .t{{font-family:ui-monospace,"SF Mono",Consolas,"DejaVu Sans Mono",monospace}}
footer{{max-width:1180px;margin:40px auto 0;padding:14px 20px 40px;color:var(--soft);font-size:13px}}
@media screen and (max-width:760px){{
main,.top,nav{{padding-left:14px;padding-right:14px}}
.top{{padding-top:20px}}
h1{{font-size:23px}}
h2{{margin-top:34px}}
.panel-head{{display:none}}
.limiter{{grid-template-columns:1fr 1fr;gap:10px 16px;padding:14px 14px 12px 12px}}
.limiter>div:first-child,.limiter>div:last-child{{grid-column:1/-1}}
.limiter>div:last-child{{order:-1}}
.limiter>div:first-child{{order:-2}}
.cell-name{{display:block;color:var(--soft);font-size:12.5px}}
.tiles{{grid-template-columns:1fr 1fr}}
.sample{{padding:11px 12px}}
.tokens{{font-size:12px}}
.tokens th,.tokens td{{padding-right:8px}}
}}
@media print{{
:root{{--paper:#fff}}
body{{font-size:11pt}}
nav{{display:none}}
.charts{{grid-template-columns:1fr 1fr}}
.panel-head,.limiter{{grid-template-columns:1fr 1fr 1.1fr 1.5fr;gap:4px 14px}}
.limiter{{padding:9px 12px 7px 10px}}
.panel-head{{padding:6px 12px 6px 16px}}
.chart,.tiles div,.panel,.sample{{border-color:#bbb}}
h2{{break-after:avoid}}
.prompt{{max-height:none}}
*{{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
}}
"""

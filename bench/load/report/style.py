"""How the report looks and how its points answer the pointer and the keyboard.

The page works without the script: native tooltips and one tab stop per point. With it there is one tab stop
per chart, arrow keys move along its points, and the tooltip shows at once. The colours are told apart with
any common colour vision and always go with a dash pattern, a marker shape or a name.
"""

from __future__ import annotations

CSS = """
:root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--ink:#1b1f23;--muted:#59636d;--rule:#dfe2e5;
  --grid:#eceef0;--c0:#0068b5;--c1:#b84300;--c2:#007a55;--c3:#96408f;--c4:#7a5c00;--c5:#55606a;
  --slo:#b3261e;--wait:#8098b3;--lag:#3f464d;--queue:#a3b1c0;--stream:#58b392;--bad-bg:#fdecea;
  --bad-ink:#8c1d18;--bad-rule:#b3261e;--warn-bg:#fff4dc;--warn-ink:#6b4e00;--warn-rule:#b98900;
  --good-bg:#e8f5ee;--good-ink:#0b5a3c;--good-rule:#1b8a5f}
@media (prefers-color-scheme:dark){
:root{--bg:#0f1214;--card:#171b1f;--ink:#e7eaed;--muted:#9ba6b1;--rule:#2c333a;--grid:#242a30;
  --c0:#62b1ff;--c1:#ff9757;--c2:#45cf9f;--c3:#e09ddb;--c4:#e0c04f;--c5:#a9b4be;--slo:#ff8a80;
  --wait:#6f87a3;--lag:#d3dae0;--queue:#5f6e7c;--stream:#2f9b77;--bad-bg:#3a1714;--bad-ink:#ffb4ab;
  --bad-rule:#ff8a80;--warn-bg:#33280b;--warn-ink:#f3d58a;--warn-rule:#d0a53a;--good-bg:#10291f;
  --good-ink:#8fdcb9;--good-rule:#3aa47a}
}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,
  "Segoe UI",Roboto,"Helvetica Neue","Liberation Sans",Arial,sans-serif;
  font-variant-numeric:tabular-nums}
main,header,footer{max-width:1240px;margin:0 auto;padding:0 24px}
header{padding-top:36px}
h1{font-size:27px;line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:0 0 6px;
  text-wrap:balance}
h2{font-size:18px;line-height:1.3;font-weight:650;letter-spacing:-.005em;margin:40px 0 12px}
h3{font-size:15px;font-weight:650;margin:20px 0 8px}
p{margin:0 0 8px;max-width:80ch}
.lead{color:var(--muted);overflow-wrap:anywhere;max-width:none}
.mark,.note{color:var(--muted);font-size:13px}
.num{font-variant-numeric:tabular-nums}
a{color:var(--c0)}
nav{display:flex;flex-wrap:wrap;gap:2px 16px;margin:16px 0 0;font-size:13.5px}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
.banner{border-left:4px solid;border-radius:6px;padding:12px 16px;margin:18px 0 0;
  overflow-wrap:anywhere}
.doubt{display:inline-block;margin:0 8px;padding:0 6px;border-radius:4px;font-style:normal;
  font-size:12px;font-weight:650;background:var(--bad-bg);color:var(--bad-ink)}
.banner strong{letter-spacing:.01em}
.banner ul{margin:6px 0 0;padding-left:20px}
.bad{background:var(--bad-bg);color:var(--bad-ink);border-color:var(--bad-rule)}
.warn{background:var(--warn-bg);color:var(--warn-ink);border-color:var(--warn-rule)}
.good{background:var(--good-bg);color:var(--good-ink);border-color:var(--good-rule)}
.tiles{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:12px;
  margin:20px 0 0;padding:0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px}
.tile dt{color:var(--muted);font-size:13px}
.tile dd{margin:2px 0 0}
.tile .value{display:block;font-size:23px;line-height:1.25;font-weight:620;letter-spacing:-.015em}
.tile .sub{display:block;color:var(--muted);font-size:12.5px;line-height:1.4}
.tiles+.grid-of-charts{margin-top:16px}
.grid-of-charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:10px;
  padding:16px 18px 10px;min-width:0}
@supports (grid-template-rows:subgrid){
figure{display:grid;grid-template-rows:subgrid;grid-row:span 3;row-gap:0}
}
figure.wide{grid-column:1/-1}
figcaption b{display:block;font-weight:620;font-size:15px}
figcaption span{display:block;color:var(--muted);font-size:13px;line-height:1.4;margin-bottom:8px}
.scroll{overflow-x:auto;max-width:100%}
svg.chart{display:block;width:100%;height:auto;min-width:440px;overflow:visible}
figure.wide svg.chart{min-width:760px}
svg.chart text{font-size:11.5px;fill:var(--ink)}
svg.chart .tick,svg.chart .axis-title{fill:var(--muted)}
svg.chart .axis-title{font-size:11.5px}
svg.chart .key{font-size:11.5px}
svg.chart .ref-label{font-size:11px;fill:var(--muted);paint-order:stroke;stroke:var(--card);
  stroke-width:3px;stroke-linejoin:round}
svg.chart .end{font-weight:600;fill:currentColor}
.grid{stroke:var(--grid)}
.axis{stroke:var(--muted);stroke-opacity:.6}
.ref{stroke:var(--muted);stroke-dasharray:2 3}
.slo{stroke:var(--slo);stroke-dasharray:5 3;stroke-opacity:.85}
.knee{stroke:var(--ink);stroke-dasharray:none;stroke-opacity:.55}
.band{fill:var(--muted);fill-opacity:.1}
.c0{color:var(--c0)}
.c1{color:var(--c1)}
.c2{color:var(--c2)}
.c3{color:var(--c3)}
.c4{color:var(--c4)}
.c5{color:var(--c5)}
.muted{color:var(--muted)}
.ln{fill:none;stroke:currentColor;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}
.thin{stroke-width:1.1}
.d1{stroke-dasharray:7 4}
.d2{stroke-dasharray:1.5 3.5}
.d3{stroke-dasharray:9 3 2 3}
.d4{stroke-dasharray:4 3}
.d5{stroke-dasharray:12 3 2 3 2 3}
.dot{fill:currentColor;stroke:var(--card);stroke-width:1.2}
.spread{fill:currentColor;fill-opacity:.13}
.bar{fill:currentColor;fill-opacity:.75}
.layer{fill:currentColor;fill-opacity:.2}
.fill{fill:currentColor}
.hit{fill:transparent}
.p-lag{color:var(--lag)}
.p-wait{color:var(--wait)}
.p-queue{color:var(--queue)}
.p-prefill{color:var(--c0)}
.p-transfer{color:var(--c4)}
.p-decode{color:var(--c2)}
.p-stream{color:var(--stream)}
.p-first{color:var(--ink)}
.p-failed{color:var(--slo)}
.ink{color:var(--ink)}
.first{stroke:currentColor;stroke-width:1}
.hollow{fill:none;stroke:currentColor;stroke-width:1.6}
.pt{outline:none;cursor:default}
.pt:hover .hit,.pt:focus .hit{fill:var(--ink);fill-opacity:.09}
.pt:hover .bar,.pt:focus .bar{fill-opacity:1}
.pt:hover .dot,.pt:focus .dot{stroke:var(--ink);stroke-width:2}
.pt:focus-visible .bar,.pt:focus-visible .fill,.pt:focus-visible .hit{stroke:var(--ink);
  stroke-width:1.2}
.tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--bg);
  font-size:12.5px;line-height:1.35;padding:5px 9px;border-radius:6px;max-width:340px;
  overflow-wrap:anywhere}
table{border-collapse:collapse;font-size:13px;line-height:1.4}
th,td{text-align:right;padding:4px 12px 4px 0;border-bottom:1px solid var(--rule);
  vertical-align:top;white-space:nowrap}
th{font-weight:600;color:var(--muted)}
thead th{vertical-align:bottom;white-space:normal}
tr.invalid{background:var(--bad-bg);color:var(--bad-ink)}
th:first-child,td:first-child{text-align:left}
.left th,.left td{text-align:left;overflow-wrap:anywhere;white-space:normal}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 18px}
.card table{width:100%}
.pairs td:first-child{color:var(--muted);width:30%;white-space:nowrap}
.ratio{display:block;color:var(--muted);font-size:11.5px}
details{font-size:13px;margin:4px 0 2px}
summary{cursor:pointer;color:var(--muted);width:max-content;max-width:100%;padding:2px 0}
summary:hover{color:var(--ink)}
summary:focus-visible,a:focus-visible{outline:2px solid var(--c0);outline-offset:2px;
  border-radius:3px}
details.run{border-top:1px solid var(--rule);margin:0;padding:6px 0}
details.run>summary{font-size:16px;font-weight:620;color:var(--ink);padding:8px 0}
.omitted{color:var(--muted);font-size:13px;padding-left:20px;margin:0}
dl.words{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;font-size:13px;
  margin:8px 0}
dl.words dt{font-weight:600}
dl.words dd{margin:0;color:var(--muted)}
footer{color:var(--muted);font-size:12.5px;padding-top:36px;padding-bottom:36px}
@media (max-width:860px){
.grid-of-charts{grid-template-columns:minmax(0,1fr)}
main,header,footer{padding-left:16px;padding-right:16px}
h1{font-size:23px}
figure{padding:12px 12px 8px}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}
dl.words{grid-template-columns:1fr;gap:0}
dl.words dd{margin-bottom:6px}
.pairs td:first-child{white-space:normal}
}
@media print{
body{background:#fff}
figure,.tile{break-inside:avoid}
.tip,nav{display:none}
}
"""

SCRIPT = """
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);
  const show = (pt) => {
    tip.textContent = pt.getAttribute("aria-label");
    tip.hidden = false;
    const at = pt.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const x = Math.min(Math.max(at.left + at.width / 2 - size.width / 2, 6), innerWidth - size.width - 6);
    const above = at.top - size.height - 8;
    tip.style.left = x + "px";
    tip.style.top = (above > 4 ? above : Math.min(at.bottom + 8, innerHeight - size.height - 6)) + "px";
  };
  const hide = () => { tip.hidden = true; };
  for (const chart of document.querySelectorAll("svg.chart")) {
    const pts = [...chart.querySelectorAll(".pt")];
    pts.forEach((pt, i) => {
      const title = pt.querySelector("title");
      pt.setAttribute("aria-label", title.textContent);
      title.remove();
      pt.setAttribute("tabindex", i ? "-1" : "0");
    });
    const point = (event) => event.target.closest(".pt");
    chart.addEventListener("pointerover", (event) => point(event) ? show(point(event)) : hide());
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("focusin", (event) => point(event) && show(point(event)));
    chart.addEventListener("focusout", hide);
    chart.addEventListener("keydown", (event) => {
      const from = pts.indexOf(document.activeElement);
      const last = pts.length - 1;
      const steps = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -from, End: last - from};
      if (event.key === "Escape") hide();
      if (from < 0 || !(event.key in steps)) return;
      event.preventDefault();
      const to = Math.min(Math.max(from + steps[event.key], 0), last);
      pts[from].setAttribute("tabindex", "-1");
      pts[to].setAttribute("tabindex", "0");
      pts[to].focus();
    });
  }
  const follow = () => {
    const focused = document.activeElement;
    if (focused && focused.matches(".pt:focus-visible")) show(focused);
    else hide();
  };
  addEventListener("scroll", follow, {passive: true});
})();
"""
